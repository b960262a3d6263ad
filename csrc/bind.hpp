// One bind function per part of the core. Python types stop in the files that define them.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <exception>
#include <string>
#include <vector>

namespace pykern {

void bind_plan(pybind11::module_& module);
void bind_lower(pybind11::module_& module);
void bind_costs(pybind11::module_& module);
void bind_timeline(pybind11::module_& module);
void bind_search(pybind11::module_& module);
void bind_undo(pybind11::module_& module);
void bind_landing(pybind11::module_& module);
void bind_exec(pybind11::module_& module);
void bind_forks(pybind11::module_& module);
void bind_cuda(pybind11::module_& module);
void bind_lanes(pybind11::module_& module);
void bind_streams(pybind11::module_& module);
void bind_build(pybind11::module_& module);

// Adds an exception type to the module, and raises it for `Error`; `describe` sets attributes. It
// lives as long as the process: what raises it may do so while the interpreter shuts down.
template <class Error, void (*describe)(pybind11::object& instance, const Error& error)>
void add_error(pybind11::module_& module, const char* name, const char* doc, PyObject* base) {
    const std::string full = "pykern._C." + std::string(name);
    static PyObject* type = PyErr_NewExceptionWithDoc(full.c_str(), doc, base, nullptr);
    if (type == nullptr) throw pybind11::error_already_set();
    module.attr(name) = pybind11::reinterpret_borrow<pybind11::object>(type);
    pybind11::register_local_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const Error& error) {
            auto instance = pybind11::reinterpret_borrow<pybind11::object>(type)(error.what());
            describe(instance, error);
            PyErr_SetObject(type, instance.ptr());
        }
    });
}

// Immutable all the way down, like the values it is made of.
template <class T>
pybind11::tuple tuple_of_tuples(const std::vector<std::vector<T>>& rows) {
    pybind11::tuple result(rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
        result[i] = pybind11::tuple(pybind11::cast(rows[i]));
    }
    return result;
}

inline int in_range(const char* name, int value, int count) {
    if (value >= 0 && value < count) return value;
    throw pybind11::index_error(std::string(name) + " must be 0 to " + std::to_string(count - 1) +
                                ", got " + std::to_string(value));
}

}  // namespace pykern
