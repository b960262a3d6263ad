// Python's side of lanes: GPUs, or parts of them, with their streams.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "exec/lanes.hpp"
#include "interpreter_lock.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace pykern {

namespace {

using Address = std::uintptr_t;

using PyLanes = py::class_<Lanes, std::shared_ptr<Lanes>>;

// Copies between the lanes' GPUs.
void bind_peers(PyLanes& lanes) {
    lanes
        .def(
            "reaches",
            [](const Lanes& self, int sender, int receiver) {
                in_range("sender", sender, self.size());
                in_range("receiver", receiver, self.size());
                return self.reaches(sender, receiver);
            },
            "sender"_a, "receiver"_a,
            "Whether one lane's GPU can write to the memory of the other's, and may.")
        .def(
            "avoid",
            [](Lanes& self, int sender, int receiver) {
                in_range("sender", sender, self.size());
                in_range("receiver", receiver, self.size());
                self.avoid(sender, receiver);
            },
            "sender"_a, "receiver"_a,
            "Has programs made from here on copy between the lanes' GPUs by way of the host.")
        .def(
            "copy_at_once",
            [](const Lanes& self,
               const std::vector<std::tuple<int, Address, Address, std::size_t>>& given) {
                std::vector<LaneCopy> copies;
                copies.reserve(given.size());
                for (const auto& [sender, to, from, bytes] : given) {
                    in_range("sender", sender, self.size());
                    copies.push_back({.sender = sender, .to = to, .from = from, .bytes = bytes});
                }
                const Unlocked unlocked;
                self.copy_at_once(copies);
            },
            "copies"_a,
            "Copies (sender, to, from, bytes) side by side and waits for them. Nothing else may "
            "use the memory. Raises CudaError.");
}

}  // namespace

void bind_lanes(py::module_& module) {
    PyLanes lanes(module, "Lanes",
                  "GPUs, or parts of them, as the devices of a plan, with their streams.");
    lanes
        .def(py::init([](const std::vector<std::tuple<int, int, int>>& given) {
                 std::vector<LaneName> names;
                 names.reserve(given.size());
                 for (const auto& [gpu, part, num_parts] : given) {
                     names.push_back({.gpu = gpu, .part = part, .num_parts = num_parts});
                 }
                 return std::make_shared<Lanes>(std::move(names));
             }),
             "names"_a)
        .def("__len__", &Lanes::size)
        .def(
            "gpu_of",
            [](const Lanes& self, int lane) {
                in_range("lane", lane, self.size());
                return self.gpu_of(lane);
            },
            "lane"_a, "The number of a lane's GPU.")
        .def(
            "compute",
            [](const Lanes& self, int lane) {
                in_range("lane", lane, self.size());
                return reinterpret_cast<Address>(self.compute(lane));
            },
            "lane"_a, "Handle of the stream on which the lane computes.")
        .def(
            "ring",
            [](const Lanes& self, int gpu) { return reinterpret_cast<Address>(self.ring(gpu)); },
            "gpu"_a, "Handle of a stream of the GPU on which nothing runs.")
        .def("close", &Lanes::close,
             "Leaves the streams to others, once all their work is done. No step may begin after.");
    bind_peers(lanes);
}

}  // namespace pykern
