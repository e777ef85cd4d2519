// The module mappnb._core: each part registers itself.
#include <nanobind/nanobind.h>

void register_recorder(nanobind::module_& m);

NB_MODULE(_core, m) {
  m.doc() = "Compiled parts of mappnb; each has a pure-Python twin.";
  register_recorder(m);
}
