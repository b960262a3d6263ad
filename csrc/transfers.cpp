#include "transfers.hpp"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace pykern {

Transfers transfers_from(const std::vector<PythonTransfer>& given) {
    Transfers transfers;
    transfers.reserve(given.size());
    for (const auto& [to, from, bytes, via] : given) {
        transfers.push_back({.to = to, .from = from, .bytes = bytes, .via = via});
    }
    return transfers;
}

Transfers transfers_returned(const py::object& result) {
    if (result.is_none()) return {};
    return transfers_from(py::cast<std::vector<PythonTransfer>>(result));
}

}  // namespace pykern
