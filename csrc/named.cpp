#include "named.hpp"

namespace py = pybind11;

namespace pykern {

std::string shown(py::handle value) {
    // As in Python's messages, which count letters, not bytes.
    constexpr std::size_t kMost = 60;
    const py::str text(py::repr(value));
    if (py::len(text) <= kMost) return text;
    return py::str(text[py::slice(0, kMost - 3, 1)]).cast<std::string>() + "...";
}

}  // namespace pykern
