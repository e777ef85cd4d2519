// Python's view of trace_json.hpp: bytes in, columns and names out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <stdexcept>

#include "trace_json.hpp"

namespace nb = nanobind;
using namespace mappnb::trace;

namespace {

std::vector<Field> wanted(nb::typed<nb::sequence, nb::object> fields) {
  std::vector<Field> out;
  for (nb::handle entry : fields) {
    auto [where, name, kind] = nb::cast<std::tuple<std::string, std::string, std::string>>(entry);
    const bool known = kind.size() == 1 && std::string("ifsktcar").find(kind) != std::string::npos;
    if (!known || (where != "event" && where != "args"))
      throw std::invalid_argument("field " + name + ": expected ('event' or 'args', name, one of 'ifsktcar')");
    out.push_back({name, Kind(kind[0]), where == "args"});
  }
  if (out.size() > 120) throw std::invalid_argument("more than 120 fields");
  return out;
}

template <typename T>
nb::object array(std::vector<T>&& from) {
  auto kept = std::make_unique<std::vector<T>>(std::move(from));
  T* data = kept->data();
  const size_t n = kept->size();
  nb::capsule owner(kept.release(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {n}, owner));
}

nb::typed<nb::dict, nb::str, nb::object> take(Reader& self) {
  nb::dict out;
  std::vector<Column> columns = self.take();
  for (size_t i = 0; i < columns.size(); i++) {
    Column& c = columns[i];
    if (c.kind == Kind::args) continue;
    const std::string name = (self.fields()[i].in_args ? "args." : "") + self.fields()[i].name;
    out[name.c_str()] = c.kind == Kind::real                              ? array(std::move(c.reals))
                        : c.kind == Kind::text || c.kind == Kind::counter ? array(std::move(c.texts))
                        : c.kind == Kind::letter                          ? array(std::move(c.letters))
                                                                          : array(std::move(c.ints));
  }
  return out;
}

nb::object decoded(std::string_view text) {
  return nb::steal(PyUnicode_DecodeUTF8(text.data(), Py_ssize_t(text.size()), "replace"));
}

nb::typed<nb::list, nb::str> names(const Reader& self, size_t first) {
  nb::list out;
  for (size_t i = first; i < self.names().size(); i++) out.append(decoded(self.names()[i]));
  return out;
}

nb::typed<nb::dict, nb::str, nb::str> metadata(const Reader& self) {
  nb::dict out;
  for (const auto& [key, text] : self.metadata()) out[decoded(key)] = decoded(text);
  return out;
}

nb::typed<nb::dict, nb::str, nb::int_> repairs(const Reader& self) {
  nb::dict out;
  for (size_t i = 0; i < kRepairs; i++)
    if (self.repairs()[i]) out[kRepairNames[i]] = self.repairs()[i];
  return out;
}

void feed(Reader& self, nb::bytes data) {
  nb::gil_scoped_release unlocked;
  self.feed(data.c_str(), data.size());
}

void finish(Reader& self) {
  nb::gil_scoped_release unlocked;
  self.finish();
}

}  // namespace

void register_trace_json(nb::module_& m) {
  m.attr("TRACE_MISSING") = kMissing;
  m.attr("TRACE_TEXT_KEY") = kTextKey;
  nb::class_<Reader>(m, "TraceReader",
                     "Reads trace-event JSON in pieces into columns. See mappnb.capture.importers._tracejson.")
      .def(
          "__init__",
          [](Reader* self, nb::typed<nb::sequence, nb::object> fields, int shift, bool hunt) {
            if (shift < 0 || shift > 9) throw std::invalid_argument("shift: expected 0 (ns) to 9 (s)");
            new (self) Reader(wanted(fields), shift, hunt);
          },
          nb::arg("fields"), nb::arg("shift") = 3, nb::arg("hunt") = false)
      .def("feed", &feed, nb::arg("data"), "Read on.")
      .def("finish", &finish, "Tell that the data is at its end.")
      .def("take", &take, "Return the rows read since the last call, as columns.")
      .def("names", &names, nb::arg("first") = 0, "Return the texts from number `first` on.")
      .def_prop_ro("rows", &Reader::rows, "Rows not taken yet.")
      .def_prop_ro("metadata", &metadata, "Top-level entries other than the events, as JSON text.")
      .def_prop_ro("repairs", &repairs, "What was mended or left out, by kind.")
      .def_prop_ro("bytes", &Reader::bytes, "Bytes fed.")
      .def_prop_ro("state", &Reader::state, "Where in the document the reader is.");
}
