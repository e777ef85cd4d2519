"""What runs inside the training job: recorder, clock, probes, and the session that writes one rank's part of a run."""
