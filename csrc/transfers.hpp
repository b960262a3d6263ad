// Transfers and streams as Python passes them around.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "exec/stream_job.hpp"

namespace pykern {

using Address = std::uintptr_t;
// to, from, bytes, and by way of which pinned memory, or 0.
using PythonTransfer = std::tuple<Address, Address, std::size_t, Address>;

Transfers transfers_from(const std::vector<PythonTransfer>& given);

// The transfers that an action has returned; empty for None. Throws pybind11's error of a cast.
Transfers transfers_returned(const pybind11::object& result);

}  // namespace pykern
