// The CUDA driver as Python sees it: what devices there are, and what a failed call says.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "cuda/device.hpp"
#include "cuda/driver.hpp"
#include "cuda/lasting.hpp"
#include "interpreter_lock.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace pykern {

namespace {

// Name and number of multiprocessors of each.
std::vector<std::pair<std::string, int>> devices() {
    const int count = cuda::device_count();
    std::vector<std::pair<std::string, int>> result;
    result.reserve(static_cast<std::size_t>(count));
    for (int device = 0; device < count; ++device) {
        result.emplace_back(cuda::device_name(device), cuda::num_sms(device));
    }
    return result;
}

void describe(py::object& instance, const cuda::CudaError& error) {
    instance.attr("call") = error.call();
    instance.attr("code") = error.code();
}

void bind_driver_error(py::module_& module) {
    const char* doc =
        "A call of the CUDA driver that failed. `call` is its name, `code` the driver's number;\n"
        "the text has the driver's words for it.";
    add_error<cuda::CudaError, describe>(module, "CudaError", doc, PyExc_RuntimeError);
}

}  // namespace

void bind_cuda(py::module_& module) {
    bind_driver_error(module);
    // Whichever comes first may take seconds to load the driver, in which Python runs on. Each
    // raises RuntimeError with the reason where there is no driver, or none that is new enough.
    using WithoutLock = py::call_guard<Unlocked>;
    module.def("cuda_version", &cuda::driver_version, WithoutLock(),
               "The newest CUDA release that the driver serves, such as \"13.0\".");
    module.def("cuda_devices", &devices, WithoutLock(),
               "Name and number of multiprocessors of each device, in torch's order.");
    module.def("cuda_can_access_peer", &cuda::can_access_peer, "device"_a, "peer"_a, WithoutLock(),
               "Whether a device can reach the memory of another.");
    module.def("destroy_idle_streams", &cuda::destroy_idle_streams,
               "Ends the streams that pipelines have left for others, and lets go of their GPUs.");
    module.def("use_cuda_driver", &cuda::use_library, "library"_a,
               "Takes the driver's functions from another library, such as a fake one. For tests: "
               "no object of the driver before may be alive.");
}

}  // namespace pykern
