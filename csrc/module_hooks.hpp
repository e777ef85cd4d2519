// What module_hooks_py.cpp gives to Python: hooks on modules, and on the gradients of the tensors between them. The
// pure-Python twin mappnb/capture/_pymodulehooks.py has the same semantics, and is the one to read first.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "recorder.hpp"

namespace mappnb {

namespace nb = nanobind;

constexpr size_t kMaxOld = 64;                       // unfinished passes of earlier generations that a tensor keeps
constexpr size_t kMaxSpares = 1024, kMaxProbes = 4;  // boundaries kept for tensors to come; how many are looked at

using Sites = std::array<int32_t, 4>;  // forward, backward, recompute, backward_input

// The backward pass through one call of one module: begun when its output's gradient is there.
struct Pass {
  explicit Pass(const Sites& sites_) : sites(sites_) {}

  const Sites sites;
  int64_t token = 0, start_ns = -1;
  bool tail = false, begun = false;
};
using PassPtr = std::shared_ptr<Pass>;

// Passes tied to a tensor: what earlier generations left, then those of the present one, the innermost first.
struct Passes {
  std::vector<PassPtr> steps;
  size_t num_old = 0;

  void add(PassPtr step) { steps.insert(steps.begin() + static_cast<std::ptrdiff_t>(num_old), std::move(step)); }

  void clear() {
    steps.clear();
    num_old = 0;
  }

  template <typename Done>
  void renew(Done done) {
    steps.erase(std::remove_if(steps.begin(), steps.end(), done), steps.end());
    if (steps.size() > kMaxOld) steps.erase(steps.begin(), steps.end() - kMaxOld);
    num_old = steps.size();
  }
};

// Throws the Python error, if there is one, as an exception; else owns `result`.
inline nb::object checked(PyObject* result) {
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}
inline bool checked(int status) {
  if (status < 0) throw nb::python_error();
  return status != 0;
}

inline int64_t to_int(const nb::object& number) {
  const long long value = PyLong_AsLongLong(number.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value;
}

struct Names {
  PyObject *requires_grad, *backward_hooks, *grad_fn, *register_hook_dict, *register_prehook;
};
inline Names names;
inline nb::handle boundary_type;

struct ModuleHooks;

// A tensor between modules: when its gradient is there, passes end (inner first) and begin (outer first).
struct Boundary {
  nb::object keep;  // the Python object of `owner`
  ModuleHooks* owner;
  uint64_t generation;
  Passes ends, starts;

  void renew(uint64_t now);
  void reset(uint64_t now);
  void pass_through();
};

// A boundary and the hooks of a tensor that has no other. It is free again when nothing else holds either.
struct Spare {
  nb::object hooks, boundary;

  bool is_free() const {
    return Py_REFCNT(hooks.ptr()) == 1 && Py_REFCNT(boundary.ptr()) == 2 && PyDict_Size(hooks.ptr()) == 1;
  }
};

// A ring of them, since boundaries mostly die in the order in which they were made, or nearly so. Making and freeing
// them each time would cost a third more, and more garbage collections.
class Spares {
 public:
  // One of the next few that is free, past those of tensors that live long; null: then make another for add().
  const Spare* next() {
    for (size_t i = 0; i < std::min(kMaxProbes, ring_.size()); ++i) {
      const size_t at = (at_ + i) % ring_.size();
      if (!ring_[at].is_free()) continue;
      at_ = at + 1;
      return &ring_[at];
    }
    return nullptr;
  }
  void add(Spare spare) {
    if (at_ >= ring_.size()) at_ = 0;
    if (ring_.size() < kMaxSpares) {
      ring_.insert(ring_.begin() + static_cast<std::ptrdiff_t>(at_), std::move(spare));
    } else {
      std::swap(ring_[at_], spare);
    }
    ++at_;
  }
  std::vector<Spare> take_all() { return std::exchange(ring_, {}); }
  const std::vector<Spare>& all() const { return ring_; }

 private:
  std::vector<Spare> ring_;
  size_t at_ = 0;
};

// What all hooks of one recording share.
struct ModuleHooks {
  nb::object keep;  // the Python object of `recorder`
  Recorder* recorder;
  nb::object wrapped_begin, wrapped_end;  // what is called instead of the recorder's own, or null
  nb::object fail, key, graph_task, grad_enabled, tensor_type, no_hook, new_dict;
  bool muted = false;
  uint32_t backward_index = 1;
  uint64_t generation = 0;
  std::vector<PassPtr> tails = {};
  Spares spares = {};

  int64_t begin(int32_t site) const {
    if (!wrapped_begin) return recorder->begin(site);
    const nb::object function = wrapped_begin;
    return to_int(function(site));
  }

  void end(int64_t token) const {
    if (!wrapped_end) return recorder->end(token, {});
    const nb::object function = wrapped_end;
    function(token);
  }

  bool in_backward() const { return to_int(checked(PyObject_CallNoArgs(graph_task.ptr()))) != -1; }

  bool records_gradients() const {
    return checked(PyObject_IsTrue(checked(PyObject_CallNoArgs(grad_enabled.ptr())).ptr()));
  }

  bool has_gradient(nb::handle value) const {
    if (!value || value.is_none() || !checked(PyObject_IsInstance(value.ptr(), tensor_type.ptr()))) return false;
    return checked(PyObject_IsTrue(checked(PyObject_GetAttr(value.ptr(), names.requires_grad)).ptr()));
  }

  // The boundary at `tensor`, hooked to its gradient the first time.
  nb::object boundary(nb::handle self, nb::handle tensor) {
    const nb::object hooks = checked(PyObject_GetAttr(tensor.ptr(), names.backward_hooks));
    if (hooks.is_none()) return first_hook(self, tensor);
    if (PyDict_Check(hooks.ptr()) == 0) throw nb::type_error("the hooks of a tensor are no dict");
    PyObject* found = PyDict_GetItemWithError(hooks.ptr(), key.ptr());
    if (found != nullptr) {
      nb::inst_ptr<Boundary>(found)->renew(generation);
      return nb::borrow(found);
    }
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    nb::object made = make_boundary(self);
    checked(PyObject_SetItem(hooks.ptr(), key.ptr(), made.ptr()));
    return made;
  }

  void report(const char* where, nb::handle error) const {
    const nb::object function = fail;  // which may end the recording, and let go of it
    if (function) function(where, error);
  }

  void end_tails() {
    const std::vector<PassPtr> steps = std::exchange(tails, {});
    if (steps.empty()) return;
    const int64_t now_ns = recorder->now_ns();
    const Context at = recorder->context();
    for (const PassPtr& step : steps) {
      const int32_t site = step->sites[backward_index & 3];
      const int64_t duration_ns = now_ns - step->start_ns;
      const Record event = {step->start_ns, duration_ns,   -1, -1, -1, -1, -1, site, at.step, -1, at.stage,
                            at.chunk,       at.microbatch, -1, 0,  0,  -1};
      recorder->record(event, true);
    }
  }

 private:
  nb::object make_boundary(nb::handle self) const {
    nb::object made = nb::inst_alloc(boundary_type);
    new (nb::inst_ptr<Boundary>(made)) Boundary{nb::borrow(self), nb::inst_ptr<ModuleHooks>(self), generation, {}, {}};
    nb::inst_mark_ready(made);
    return made;
  }

  Spare take_spare(nb::handle self) {
    if (const Spare* found = spares.next()) {
      nb::inst_ptr<Boundary>(found->boundary)->reset(generation);
      return *found;
    }
    const Spare made = {checked(PyObject_CallNoArgs(new_dict.ptr())), make_boundary(self)};
    checked(PyObject_SetItem(made.hooks.ptr(), key.ptr(), made.boundary.ptr()));
    spares.add(made);
    return made;
  }

  // What Tensor.register_hook does where nobody has hooked the tensor yet, but for the handle.
  nb::object first_hook(nb::handle self, nb::handle tensor) {
    const auto [hooks, made] = take_spare(self);
    const nb::object node = checked(PyObject_GetAttr(tensor.ptr(), names.grad_fn));
    checked(PyObject_SetAttr(tensor.ptr(), names.backward_hooks, hooks.ptr()));
    if (node.is_none()) return made;
    try {
      call_method(node, names.register_hook_dict, tensor);
    } catch (nb::python_error& err) {
      if (!err.matches(PyExc_AttributeError)) throw;
      checked(PyObject_SetAttr(tensor.ptr(), names.backward_hooks, Py_None));  // a node of another kind
      call_method(node, names.register_prehook, made);
    }
    return made;
  }

  static void call_method(nb::handle self, PyObject* name, nb::handle argument) {
    PyObject* const arguments[] = {self.ptr(), argument.ptr()};
    checked(PyObject_VectorcallMethod(name, arguments, 2 | NB_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
  }
};

inline void Boundary::renew(uint64_t now) {
  if (generation == now) return;
  generation = now;
  ends.renew([](const PassPtr& step) { return step->begun && step->token == 0; });
  starts.renew([](const PassPtr& step) { return step->begun; });
}

inline void Boundary::reset(uint64_t now) {
  generation = now;
  ends.clear();
  starts.clear();
}

inline void Boundary::pass_through() {
  for (size_t i = 0; i < ends.steps.size(); ++i) {
    const PassPtr step = ends.steps[i];
    if (step->token == 0) continue;
    owner->end(std::exchange(step->token, 0));
  }
  for (size_t i = 0; i < starts.steps.size(); ++i) {  // by index: this may run Python
    const PassPtr step = starts.steps[i];
    step->begun = true;
    if (step->tail) {
      step->start_ns = owner->recorder->now_ns();
      owner->tails.push_back(step);
    } else {
      step->token = owner->begin(step->sites[owner->backward_index & 3]);
    }
  }
}

// The two forward hooks of one module.
struct ModuleHook {
  struct Call {
    int64_t token;
    PassPtr step;
  };

  nb::object keep;  // the Python object of `owner`
  ModuleHooks* owner;
  Sites sites;
  bool backward;
  nb::object before, after, keyword;  // the first two: null if there is none
  std::vector<Call> calls;

  void enter(nb::handle module, nb::handle args, nb::handle kwargs) {
    const bool in_backward = owner->in_backward();
    if (before && !in_backward) before(module, args, kwargs);
    PassPtr step;
    if (backward && owner->records_gradients()) {
      step = std::make_shared<Pass>(sites);
      const nb::object x = input(args, kwargs);
      if (owner->has_gradient(x)) {
        const nb::object at = owner->boundary(keep, x);
        nb::inst_ptr<Boundary>(at)->ends.add(step);
      } else {
        step->tail = true;
      }
    }
    const int64_t token = owner->begin(sites[in_backward ? 2 : 0]);
    calls.push_back({token, std::move(step)});
  }

  void leave(nb::handle output) {
    Call call = std::move(calls.back());
    calls.pop_back();
    owner->end(call.token);
    if (after) after();
    if (!call.step) return;
    nb::handle y = output;
    if (PyTuple_Check(output.ptr())) y = PyTuple_Size(output.ptr()) > 0 ? PyTuple_GetItem(output.ptr(), 0) : nullptr;
    if (!owner->has_gradient(y)) return;
    const nb::object at = owner->boundary(keep, y);
    nb::inst_ptr<Boundary>(at)->starts.add(std::move(call.step));
  }

 private:
  nb::object input(nb::handle args, nb::handle kwargs) const {
    if (PyTuple_Check(args.ptr()) == 0 || PyDict_Check(kwargs.ptr()) == 0) {
      throw nb::type_error("a module is called with a tuple and a dict");
    }
    if (PyTuple_Size(args.ptr()) > 0) return nb::borrow(PyTuple_GetItem(args.ptr(), 0));
    PyObject* found = PyDict_GetItemWithError(kwargs.ptr(), keyword.ptr());
    if (found == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
    return nb::borrow(found);
  }
};

}  // namespace mappnb
