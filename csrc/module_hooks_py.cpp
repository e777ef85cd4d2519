// Python's view of module_hooks.hpp. torch calls these hooks some hundred times a step, mostly with cold caches, where
// each line of Python costs several times what it does in a loop: so they are plain C functions, and call the recorder
// directly.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include <utility>

#include "module_hooks.hpp"

namespace nb = nanobind;
using mappnb::Boundary;
using mappnb::ModuleHook;
using mappnb::ModuleHooks;
using mappnb::Recorder;
using mappnb::Sites;

namespace {

PyObject* none() {
  Py_INCREF(Py_None);
  return Py_None;
}

// Does `work`; what goes wrong in it is told, and does not reach the training.
template <typename Work>
PyObject* guarded(const ModuleHooks& owner, const char* where, Work work) {
  try {
    try {
      work();
    } catch (nb::python_error& err) {
      if (!err.matches(PyExc_Exception)) throw;
      owner.report(where, err.value());
    } catch (const std::exception& err) {
      owner.report(where, nb::handle(PyExc_RuntimeError)(err.what()));
    }
  } catch (nb::python_error& err) {
    err.restore();
    return nullptr;
  }
  return none();
}

// ---- what torch calls

PyObject* hook_pre(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  ModuleHook& hook = *nb::inst_ptr<ModuleHook>(nb::handle(self));
  if (num_args != 3) return PyErr_Format(PyExc_TypeError, "pre() takes 3 arguments (%zd given)", num_args);
  if (!hook.owner->recorder->enabled()) return none();
  return guarded(*hook.owner, "module span", [&] { hook.enter(args[0], args[1], args[2]); });
}

PyObject* hook_post(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  ModuleHook& hook = *nb::inst_ptr<ModuleHook>(nb::handle(self));
  if (num_args != 3) return PyErr_Format(PyExc_TypeError, "post() takes 3 arguments (%zd given)", num_args);
  if (hook.calls.empty()) return none();
  return guarded(*hook.owner, "module span", [&] { hook.leave(args[2]); });
}

PyObject* boundary_call(PyObject* self, PyObject*, PyObject*) {
  Boundary& boundary = *nb::inst_ptr<Boundary>(nb::handle(self));
  if (boundary.owner->muted) return none();
  return guarded(*boundary.owner, "backward span", [&] { boundary.pass_through(); });
}

PyObject* hook_deepcopy(PyObject* self, PyObject*) {
  Py_INCREF(self);
  return self;
}

PyObject* hook_reduce(PyObject* self, PyObject*) {
  const nb::object empty = nb::steal(PyTuple_New(0));
  return PyTuple_Pack(2, nb::inst_ptr<ModuleHook>(nb::handle(self))->owner->no_hook.ptr(), empty.ptr());
}

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyCFunction erase(FastCall f) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f)); }

// ---- garbage collection: a session holds its hooks, and they hold its `fail`

int visit_owner(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const ModuleHooks& owner = *nb::inst_ptr<ModuleHooks>(nb::handle(self));
  Py_VISIT(owner.fail.ptr());
  Py_VISIT(owner.wrapped_begin.ptr());
  Py_VISIT(owner.wrapped_end.ptr());
  for (const mappnb::Spare& spare : owner.spares.all()) {
    Py_VISIT(spare.hooks.ptr());
    Py_VISIT(spare.boundary.ptr());
  }
  return 0;
}

void close(ModuleHooks& owner) {
  const nb::object fail = std::move(owner.fail);
  const nb::object begin = std::move(owner.wrapped_begin), end = std::move(owner.wrapped_end);
  const std::vector<mappnb::Spare> spares = owner.spares.take_all();
}

int clear_owner(PyObject* self) {
  if (nb::inst_ready(self)) close(*nb::inst_ptr<ModuleHooks>(nb::handle(self)));
  return 0;
}

int visit_hook(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const ModuleHook& hook = *nb::inst_ptr<ModuleHook>(nb::handle(self));
  Py_VISIT(hook.keep.ptr());
  Py_VISIT(hook.before.ptr());
  Py_VISIT(hook.after.ptr());
  return 0;
}

int clear_hook(PyObject* self) {
  if (!nb::inst_ready(self)) return 0;
  ModuleHook& hook = *nb::inst_ptr<ModuleHook>(nb::handle(self));
  const nb::object before = std::move(hook.before), after = std::move(hook.after);
  return 0;
}

int visit_boundary(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<Boundary>(nb::handle(self))->keep.ptr());
  return 0;
}

// ---- registration

PyMethodDef hook_methods[] = {
    {"pre", erase(hook_pre), METH_FASTCALL, "Before the forward: begin its span, tie its backward's end to its input."},
    {"post", erase(hook_post), METH_FASTCALL, "After it: end its span, tie its backward's begin to its output."},
    {"__deepcopy__", hook_deepcopy, METH_O, "Return itself: copies of a module share its hooks."},
    {"__reduce__", hook_reduce, METH_NOARGS, "Pickle as a hook that does nothing."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot owner_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(visit_owner)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_owner)},
    {0, nullptr},
};
PyType_Slot hook_slots[] = {
    {Py_tp_methods, hook_methods},
    {Py_tp_traverse, reinterpret_cast<void*>(visit_hook)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_hook)},
    {0, nullptr},
};
PyType_Slot boundary_slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(boundary_call)},
    {Py_tp_traverse, reinterpret_cast<void*>(visit_boundary)},
    {0, nullptr},
};

nb::object optional(nb::object value) { return value.is_none() ? nb::object() : value; }

void make_owner(ModuleHooks* self, nb::handle_t<Recorder> recorder, nb::object begin, nb::object end, nb::object fail,
                nb::object key, nb::object graph_task, nb::object grad_enabled, nb::object tensor_type,
                nb::object no_hook) {
  new (self) ModuleHooks{nb::borrow(recorder),
                         nb::inst_ptr<Recorder>(recorder),
                         optional(std::move(begin)),
                         optional(std::move(end)),
                         std::move(fail),
                         std::move(key),
                         std::move(graph_task),
                         std::move(grad_enabled),
                         std::move(tensor_type),
                         std::move(no_hook),
                         nb::module_::import_("collections").attr("OrderedDict")};
}

nb::object make_hook(nb::handle_t<ModuleHooks> self, const Sites& sites, bool backward, nb::object before,
                     nb::object after, nb::object keyword) {
  return nb::cast(ModuleHook{nb::borrow(self),
                             nb::inst_ptr<ModuleHooks>(self),
                             sites,
                             backward,
                             optional(std::move(before)),
                             optional(std::move(after)),
                             std::move(keyword),
                             {}});
}

nb::object get_boundary(nb::handle_t<ModuleHooks> self, nb::handle tensor) {
  return nb::inst_ptr<ModuleHooks>(self)->boundary(self, tensor);
}

void register_hook(nb::module_& m) {
  auto hook = nb::class_<ModuleHook>(m, "ModuleHook", nb::type_slots(hook_slots), nb::is_final(),
                                     "The two forward hooks of one module.");
  hook.def_prop_ro("num_open", [](const ModuleHook& h) { return h.calls.size(); }, "Calls that are open.");
  hook.def("drop", [](ModuleHook& h) { h.calls.clear(); }, "Forget calls that exceptions left open.");
}

void register_boundary(nb::module_& m) {
  auto boundary = nb::class_<Boundary>(m, "Boundary", nb::type_slots(boundary_slots), nb::is_final(),
                                       "A tensor between modules, called with its gradient.");
  boundary.def_prop_ro(
      "num_passes", [](const Boundary& b) { return b.ends.steps.size() + b.starts.steps.size(); },
      "Passes that are tied to it.");
  boundary.attr("__torch_unserializable__") = true;
  mappnb::boundary_type = boundary;
}

void register_owner(nb::module_& m) {
  auto owner = nb::class_<ModuleHooks>(m, "ModuleHooks", nb::type_slots(owner_slots), nb::is_final(),
                                       "Native twin of ``mappnb.capture._pymodulehooks.PyModuleHooks``.");
  owner.def(
      "__init__", &make_owner, nb::arg("recorder"), nb::arg("begin").none(), nb::arg("end").none(), nb::arg("fail"),
      nb::arg("key"), nb::arg("graph_task"), nb::arg("grad_enabled"), nb::arg("tensor_type"), nb::arg("no_hook"),
      nb::sig(
          "def __init__(self, recorder: object, begin: collections.abc.Callable[[int], int] | None, end: "
          "collections.abc.Callable[[int], None] | None, fail: collections.abc.Callable[[str, BaseException], None], "
          "key: int, graph_task: collections.abc.Callable[[], int], "
          "grad_enabled: collections.abc.Callable[[], bool], tensor_type: type, no_hook: type) -> None"));
  owner.def_rw("muted", &ModuleHooks::muted, "Whether the backward pass goes through no module as a whole.");
  owner.def_rw("backward_index", &ModuleHooks::backward_index,
               "Which site a backward pass has: 1, or 3 for input only.");
  owner.def("hook", &make_hook, nb::arg("sites"), nb::arg("backward"), nb::arg("before").none(),
            nb::arg("after").none(), nb::arg("keyword"), "Make the hooks of one module.",
            nb::sig("def hook(self, sites: collections.abc.Sequence[int], backward: bool, "
                    "before: collections.abc.Callable[..., None] | None, "
                    "after: collections.abc.Callable[[], None] | None, keyword: str) -> ModuleHook"));
  owner.def("has_gradient", &ModuleHooks::has_gradient, nb::arg("value").none(),
            "Whether autograd will give a gradient for ``value``.");
  owner.def("boundary", &get_boundary, nb::arg("tensor"), "Return the boundary at a tensor; hook it the first time.",
            nb::sig("def boundary(self, tensor: object) -> Boundary"));
  owner.def(
      "forget", [](ModuleHooks& o) { ++o.generation; }, "Make the passes until now those of an earlier generation.");
  owner.def("close", &close, "Let go of the session: tensors may live longer than it.");
  owner.def("end_tails", &ModuleHooks::end_tails, "End the backward of modules whose input has no gradient.");
}

}  // namespace

void register_module_hooks(nb::module_& m) {
  mappnb::names = {PyUnicode_InternFromString("requires_grad"), PyUnicode_InternFromString("_backward_hooks"),
                   PyUnicode_InternFromString("grad_fn"), PyUnicode_InternFromString("_register_hook_dict"),
                   PyUnicode_InternFromString("register_prehook")};
  register_hook(m);
  register_boundary(m);
  register_owner(m);
}
