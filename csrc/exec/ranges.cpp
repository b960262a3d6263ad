#include "exec/ranges.hpp"

#ifdef PYKERN_NVTX

#include <nvtx3/nvToolsExt.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "exec/thread_numbers.hpp"
#include "plan/text.hpp"

namespace pykern {

namespace {

struct Look {
    std::uint32_t category;
    std::uint32_t argb;
};

constexpr std::uint32_t kCopyCategory = 7;
constexpr std::uint32_t kStepCategory = 9;

// In the order of Kind. The colours are those of pykern.plan.drawing for a single stage; categories
// count from 1, since 0 is NVTX's for none.
constexpr std::array<Look, kNumKinds> kLooks = {{
    {1, 0xff86b2d8},              // F
    {2, 0xffbaa8da},              // R
    {3, 0xffecb077},              // B
    {4, 0xffe490aa},              // I
    {5, 0xffc4cb6e},              // W
    {6, 0xff98c8bc},              // U
    {kCopyCategory, 0xffb9b9b9},  // COPY_F
    {kCopyCategory, 0xffb9b9b9},  // COPY_B
    {8, 0xffb9b9b9},              // REDUCE
    {kCopyCategory, 0xffb9b9b9},  // OFFLOAD
    {kCopyCategory, 0xffb9b9b9},  // LOAD
}};

// nvToolsExtCuda.h calls it NVTX_RESOURCE_TYPE_CUDA_STREAM, but needs CUDA's own header.
constexpr std::int32_t kCudaStream = 0x40003;

struct Domain {
    Domain() : handle(nvtxDomainCreateA("pykern")) {
        for (std::size_t i = 0; i < kNumKinds; ++i) {
            const char* name = kind_name(static_cast<Kind>(i));
            const std::uint32_t category = kLooks[i].category;
            const bool copies = category == kCopyCategory;
            nvtxDomainNameCategoryA(handle, category, copies ? "COPY" : name);
        }
        nvtxDomainNameCategoryA(handle, kStepCategory, "STEP");
    }

    void push(const char* text, std::uint32_t category, std::uint32_t argb,
              std::uint64_t payload) const {
        nvtxEventAttributes_t range{};
        range.version = NVTX_VERSION;
        range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
        range.category = category;
        range.colorType = NVTX_COLOR_ARGB;
        range.color = argb;
        range.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
        range.payload.ullValue = payload;
        range.messageType = NVTX_MESSAGE_TYPE_ASCII;
        range.message.ascii = text;
        nvtxDomainRangePushEx(handle, &range);
    }

    nvtxDomainHandle_t handle;  // null without a tool
};

// Made at the first call, which is when NVTX looks for a tool. Lives as long as the process, since
// threads may end after static objects.
const Domain& domain() {
    static const Domain& made = *new Domain;
    return made;
}

}  // namespace

bool nvtx_built() noexcept { return true; }

Range::Range(Action action, int device) noexcept : torch_(action, device) {
    if (domain().handle == nullptr) return;
    const auto& look = kLooks[static_cast<std::size_t>(action.kind)];
    std::array<char, 24> text{};  // the longest is "OFFLOAD s65535"
    std::snprintf(text.data(), text.size(), "%s s%u", kind_name(action.kind),
                  unsigned{action.stage});
    domain().push(text.data(), look.category, look.argb,
                  static_cast<std::uint64_t>(device) << 48 | std::uint64_t{action.stage} << 32 |
                      action.microbatch);
}

Range::Range() noexcept {
    if (domain().handle != nullptr) domain().push("step", kStepCategory, 0xff5a5a5a, 0);
}

Range::~Range() {
    if (domain().handle != nullptr) nvtxDomainRangePop(domain().handle);
}

void name_thread(const char* name) noexcept {
    // NVTX must not be called for the first time by two threads at once.
    domain();
    nvtxNameOsThreadA(static_cast<std::uint32_t>(this_thread_number()), name);
}

void name_stream(CUstream_st* stream, const char* name) noexcept {
    nvtxResourceAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_RESOURCE_ATTRIB_STRUCT_SIZE;
    attributes.identifierType = kCudaStream;
    attributes.identifier.pValue = stream;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = name;
    nvtxDomainResourceCreate(domain().handle, &attributes);
}

}  // namespace pykern

#else

namespace pykern {

bool nvtx_built() noexcept { return false; }

Range::Range(Action action, int device) noexcept : torch_(action, device) {}
Range::Range() noexcept = default;
Range::~Range() = default;
void name_thread(const char* /*name*/) noexcept {}
void name_stream(CUstream_st* /*stream*/, const char* /*name*/) noexcept {}

}  // namespace pykern

#endif
