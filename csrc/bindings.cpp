// The module mappnb._core: each part registers itself.
#include <nanobind/nanobind.h>

void register_recorder(nanobind::module_& m);
void register_module_hooks(nanobind::module_& m);
void register_schedule(nanobind::module_& m);
void register_policy(nanobind::module_& m);
void register_replay(nanobind::module_& m);
void register_self_time(nanobind::module_& m);
void register_nesting(nanobind::module_& m);
void register_trace_json(nanobind::module_& m);
void register_segment_columns(nanobind::module_& m);
void register_tensor_stats(nanobind::module_& m);

NB_MODULE(_core, m) {
  nanobind::set_leak_warnings(false);  // a recorder lives as long as the process: nothing to warn of at its end
  m.doc() = "Compiled parts of mappnb; each has a pure-Python twin.";
  register_recorder(m);
  register_module_hooks(m);
  register_schedule(m);
  register_policy(m);
  register_replay(m);
  register_self_time(m);
  register_nesting(m);
  register_trace_json(m);
  register_segment_columns(m);
  register_tensor_stats(m);
}
