"""Clock alignment: error, coverage of the stated bound and cost, beside baselines: ``python bench_align.py [seeds [case]]``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "analysis"))
from alignment_runs import Truth, collectives, errors, exit_noise

from mappnb.analysis import align

TIMES = tuple(np.linspace(0, 1, 9))


def resampled(values: np.ndarray):
    return lambda rng, shape: rng.choice(values, shape)


def lasting(values: np.ndarray, spread: float = 0.3):
    """Some ranks are noisier than others, and noise lasts for a while (AR(1) of its rank in the distribution)."""

    def draw(rng, shape):
        z = rng.standard_normal(shape)
        for i in range(1, len(z)):
            z[i] = 0.6 * z[i - 1] + 0.8 * z[i]
        ordered = np.sort(values)
        u = np.argsort(np.argsort(z.ravel())).reshape(shape) / z.size
        return ordered[(u * len(ordered)).astype(int)] * rng.lognormal(0, spread, (1, shape[1]))

    return draw


def grid_groups(tp: int, dp: int) -> list[tuple[int, ...]]:
    """Groups of tensor and data parallelism, none of which holds all ranks."""
    return [tuple(d * tp + t for t in range(tp)) for d in range(dp)] + [
        tuple(d * tp + t for d in range(dp)) for t in range(tp)
    ]


def cases() -> dict[str, dict]:
    param, ar, se = (exit_noise(n) for n in ("param", "AR", "SE"))
    steps = [(9, 1.5e10, 2.5e7), (40, 3.1e10, 4e6)]
    return {
        "param": {"noise": resampled(param)},
        "AR": {"noise": resampled(ar), "transfer_ns": 5e6},
        "SE": {"noise": resampled(se), "transfer_ns": 2e7},
        "param, 2 steps": {"noise": resampled(param), "steps": steps},
        "AR, 2 steps": {"noise": resampled(ar), "steps": steps, "transfer_ns": 5e6},
        "SE, 2 steps": {"noise": resampled(se), "steps": steps, "transfer_ns": 2e7},
        "param, lasting": {"noise": lasting(param + 500)},
        "AR, lasting": {"noise": lasting(ar + 1e4), "transfer_ns": 5e6},
        "param, 8x8 grid": {"noise": resampled(param), "groups": grid_groups(8, 8)},
        "AR, 8x8 grid": {"noise": resampled(ar), "groups": grid_groups(8, 8), "transfer_ns": 5e6},
    }


def baselines(events, truth: Truth, num_ranks: int) -> dict[str, np.ndarray]:
    """Errors (rank, time) of offsets without drift: first call, one call in the middle, median over calls."""
    n = int((events.group.values == events.group.values[0]).sum()) // num_ranks
    if n * num_ranks != int((events.group.values == events.group.values[0]).sum()):
        return {}
    end = (events.start_ns + events.duration_ns).values[: n * num_ranks].reshape(n, num_ranks)
    skew = end - np.median(end, axis=1, keepdims=True)
    found = {"barrier": skew[0], "single anchor": skew[n // 2], "median skew": np.median(skew, axis=0)}
    out = {}
    first, last = end.min() + 6e7, end.max() - 6e7
    for name, offset in found.items():
        offset = offset - offset[0]
        at = first + np.array(TIMES) * (last - first)
        raw = truth.raw(np.arange(num_ranks)[:, None], at[None, :])
        out[name] = raw - offset[:, None] - truth.raw(np.zeros((1, 1), int), at[None, :])
    return out


def study(seeds: int = 6, num_ranks: int = 64, num_calls: int = 1000, only: str = "") -> list[dict]:
    rows = []
    for name, options in cases().items():
        if only and only not in name:
            continue
        found, sigma, bound, resid, cpu, other, steps = [], [], [], [], [], {}, []
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            calls = num_calls // 8 if "groups" in options else num_calls
            events, truth, _, noises = collectives(rng, num_ranks=num_ranks, num_calls=calls, **options)
            begin = time.process_time()
            a = align(events)
            cpu.append(time.process_time() - begin)
            found.append(errors(events, a, truth, TIMES)[1:])
            sigma.append(a.sigma_ns.values[1:])
            bound.append(a.bound_ns.values[1:])
            injected = np.median([1.4826 * np.median(np.abs(x - np.median(x, axis=1, keepdims=True))) for x in noises])
            resid.append(a.attrs["residual_ns"] / injected if injected else np.nan)
            steps.append(a.attrs["num_steps"])
            if "groups" not in options:
                for key, e in baselines(events, truth, num_ranks).items():
                    other.setdefault(key, []).append(e)
        e = np.abs(np.array(found))
        b, s = np.array(bound), np.array(sigma)
        rows.append(
            {
                "case": name,
                "p50_us": np.percentile(e, 50) / 1e3,
                "p95_us": np.percentile(e, 95) / 1e3,
                "cover": float((e <= b[..., None]).mean()),
                "cover_mid": float((e[..., 4] <= b).mean()),
                "ratio": float(np.median(b) / np.percentile(e, 95)),
                "ratio_mid": float(np.median(b) / np.percentile(e[..., 4], 95)),
                "z": float(np.sqrt(((e / s[..., None]) ** 2).mean())),
                "resid": float(np.mean(resid)),
                "steps": float(np.mean(steps)),
                "cpu": float(np.median(cpu)),
                **{k: float(np.percentile(np.abs(v), 95) / 1e3) for k, v in other.items()},
            }
        )
    return rows


def main() -> int:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    rows = study(seeds, only=sys.argv[2] if len(sys.argv) > 2 else "")
    keys = list(rows[0])
    print(" | ".join(keys))
    for row in rows:
        print(" | ".join(f"{row.get(k, np.nan):.3g}" if not isinstance(row.get(k), str) else row[k] for k in keys))
    if len(sys.argv) > 2:
        return 0
    rng = np.random.default_rng(0)
    events, truth, _, _ = collectives(rng, num_ranks=1000, num_calls=1000)
    begin = time.process_time()
    a = align(events)
    cpu = time.process_time() - begin
    e = np.abs(errors(events, a, truth)[1:])
    print(f"1,000 x 1,000: {cpu:.2f} s CPU (goal 2), covered {(e <= a.bound_ns.values[1:, None]).mean():.3f}")
    return int(cpu > 2.0 or any(r["cover"] < 0.95 or r["ratio"] > 3 or r["resid"] > 1.2 for r in rows))


if __name__ == "__main__":
    sys.exit(main())
