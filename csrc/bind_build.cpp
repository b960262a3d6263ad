// How the extension was built.
#include <pybind11/pybind11.h>

#include "bind.hpp"
#include "exec/ranges.hpp"

namespace py = pybind11;

namespace pykern {

namespace {

#ifdef __clang__
constexpr const char* kCompiler = "Clang " __clang_version__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

#ifdef __OPTIMIZE__
constexpr bool kOptimised = true;
#else
constexpr bool kOptimised = false;
#endif

}  // namespace

void bind_build(py::module_& module) {
    module.attr("compiler") = kCompiler;
    module.attr("optimised") = kOptimised;
    module.attr("nvtx_built") = nvtx_built();
}

}  // namespace pykern
