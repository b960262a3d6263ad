// A profiler of one page: a library for NVTX_INJECTION64_PATH that writes each call of NVTX as a
// line to the file that PYKERN_RECORD names. Handles are numbers, counted from 1.
#include <nvtx3/nvToolsExt.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace {

std::mutex mutex;
std::FILE* record = nullptr;
std::intptr_t num_domains = 0;

template <class Handle>
long number(Handle handle) {
    return static_cast<long>(reinterpret_cast<std::intptr_t>(handle));
}

// One line; `mutex` is held, since lines of several threads must not mix.
template <class... Values>
void write(const char* format, Values... values) {
    std::fprintf(record, format, values...);
    std::fflush(record);
}

nvtxDomainHandle_t create_domain(const char* name) {
    const std::scoped_lock lock(mutex);
    write("domain %ld %s\n", static_cast<long>(++num_domains), name);
    return reinterpret_cast<nvtxDomainHandle_t>(num_domains);
}

void name_category(nvtxDomainHandle_t domain, std::uint32_t category, const char* name) {
    const std::scoped_lock lock(mutex);
    write("category %ld %u %s\n", number(domain), category, name);
}

int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* range) {
    const std::scoped_lock lock(mutex);
    const bool expected = range->messageType == NVTX_MESSAGE_TYPE_ASCII &&
                          range->payloadType == NVTX_PAYLOAD_TYPE_UNSIGNED_INT64 &&
                          range->colorType == NVTX_COLOR_ARGB;
    write("%s %d %ld %u %llu %08x %s\n", expected ? "push" : "unexpected", gettid(), number(domain),
          range->category, static_cast<unsigned long long>(range->payload.ullValue), range->color,
          range->message.ascii);
    return 0;
}

int pop(nvtxDomainHandle_t domain) {
    const std::scoped_lock lock(mutex);
    write("pop %d %ld\n", gettid(), number(domain));
    return 0;
}

void name_thread(std::uint32_t thread, const char* name) {
    const std::scoped_lock lock(mutex);
    write("thread %u %s\n", thread, name);
}

nvtxResourceHandle_t create_resource(nvtxDomainHandle_t domain,
                                     nvtxResourceAttributes_t* resource) {
    const std::scoped_lock lock(mutex);
    write("resource %ld %s\n", number(domain), resource->message.ascii);
    return nullptr;
}

template <class Function>
NvtxFunctionPointer erased(Function* function) {
    return reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t get_export_table) {
    const char* path = std::getenv("PYKERN_RECORD");
    record = path == nullptr ? nullptr : std::fopen(path, "w");
    if (record == nullptr) return 0;
    const auto* callbacks =
        static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
    NvtxFunctionTable core = nullptr;
    NvtxFunctionTable core2 = nullptr;
    callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &core, nullptr);
    callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &core2, nullptr);
    *core[NVTX_CBID_CORE_NameOsThreadA] = erased(name_thread);
    *core2[NVTX_CBID_CORE2_DomainCreateA] = erased(create_domain);
    *core2[NVTX_CBID_CORE2_DomainNameCategoryA] = erased(name_category);
    *core2[NVTX_CBID_CORE2_DomainResourceCreate] = erased(create_resource);
    *core2[NVTX_CBID_CORE2_DomainRangePushEx] = erased(push);
    *core2[NVTX_CBID_CORE2_DomainRangePop] = erased(pop);
    return 1;
}
