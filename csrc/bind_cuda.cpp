// The CUDA driver as Python sees it: what devices there are, and what a failed call says.
#include <pybind11/pybind11.h>

#include <exception>

#include "bind.hpp"
#include "cuda/device.hpp"
#include "cuda/driver.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace pykern {

namespace {

// Stands for the driver of this process, once it has been loaded.
struct CudaDriver {
    CudaDriver() { cuda::api(); }
};

void raise_cuda_error(const py::object& type, const cuda::CudaError& error) {
    const py::object instance = type(error.what());
    instance.attr("call") = error.call();
    instance.attr("code") = error.code();
    PyErr_SetObject(type.ptr(), instance.ptr());
}

void bind_error(py::module_& module) {
    const char* doc =
        "A call of the CUDA driver that failed. `call` is its name, `code` the driver's number "
        "for\n"
        "what went wrong; the text has the driver's words for it.";
    static PyObject* type = add_exception(module, "CudaError", doc, PyExc_RuntimeError);
    py::register_local_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const cuda::CudaError& error) {
            raise_cuda_error(py::reinterpret_borrow<py::object>(type), error);
        }
    });
}

}  // namespace

void bind_cuda(py::module_& module) {
    bind_error(module);
    const char* doc = "The CUDA driver of this process. Devices have the numbers torch gives them.";
    py::class_<CudaDriver>(module, "CudaDriver", doc)
        // The first may take seconds, in which Python runs on.
        .def(py::init<>(), py::call_guard<py::gil_scoped_release>(),
             "Loads the driver. Raises RuntimeError with the reason where there is none, or none\n"
             "that is new enough.")
        .def_property_readonly(
            "version", [](const CudaDriver&) { return cuda::driver_version(); },
            "The newest CUDA release that it serves, such as \"13.0\".")
        .def_property_readonly(
            "num_devices", [](const CudaDriver&) { return cuda::device_count(); },
            "How many devices this process may use.")
        .def(
            "device_name", [](const CudaDriver&, int device) { return cuda::device_name(device); },
            "device"_a, "What the maker calls this device.")
        .def(
            "num_sms", [](const CudaDriver&, int device) { return cuda::num_sms(device); },
            "device"_a, "How many multiprocessors this device has.")
        .def(
            "can_access_peer",
            [](const CudaDriver&, int device, int peer) {
                return cuda::can_access_peer(device, peer);
            },
            "device"_a, "peer"_a, "Whether this device can reach the memory of the other.");
}

}  // namespace pykern
