// The one function by which the others are found.
#include <array>
#include <cstdint>
#include <cstring>

#include "driver_model/entry.hpp"

namespace {

using namespace pykern;  // NOLINT(google-build-using-namespace)

constexpr int kFound = 0;
constexpr int kNotFound = 1;
constexpr int kVersionNotSufficient = 2;

struct Function {
    const char* name;
    int version;
    void* address;
};

const Function* find(const char* name) {
    static const auto functions = std::to_array<Function>({
#define PYKERN_FAKE_ROW(name, version, parameters) \
    {#name, version, reinterpret_cast<void*>(&fake::name)},
        PYKERN_CUDA_FUNCTIONS(PYKERN_FAKE_ROW)
#undef PYKERN_FAKE_ROW
    });
    for (const Function& function : functions) {
        if (std::strcmp(function.name, name) == 0) return &function;
    }
    return nullptr;
}

int look_up(fake::Model& model, const char* name, int version, void** address) {
    const Function* const function = find(name);
    if (function == nullptr) {
        model.violations.add(std::string(name) + " is not modelled");
        return kNotFound;
    }
    if (function->version != version) {
        model.violations.add(std::string(name) + " asked for in version " +
                             std::to_string(version) + ", pinned is " +
                             std::to_string(function->version));
        return kVersionNotSufficient;
    }
    if (fake::world().driver_version < version) return kVersionNotSufficient;
    *address = function->address;
    return kFound;
}

}  // namespace

void* fake::known_function(Model& model, const char* name) {
    const Function* const function = find(name);
    if (function == nullptr) model.refuse(std::string("no function ") + name, cuda::kInvalidValue);
    return function->address;
}

extern "C" PYKERN_FAKE_EXPORT int cuGetProcAddress_v2(const char* name, void** address, int version,
                                                      std::uint64_t /*flags*/, int* status) {
    const std::scoped_lock lock(fake::world().mutex);
    fake::Model& model = *fake::world().model;
    const fake::Entered entered(model, "cuGetProcAddress_v2");
    *address = nullptr;
    const int found = look_up(model, name, version, address);
    if (status != nullptr) *status = found;
    return cuda::kSuccess;
}
