// Ranges for torch.profiler, by functions in torch's place.
#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "exec/ranges.hpp"
#include "exec/torch_range.hpp"
#include "plan/timeline.hpp"

using namespace pykern;

namespace {

std::vector<std::string> calls;

std::int32_t start(const char* text, void* kwargs, void* const* inputs, std::uint64_t num_inputs,
                   void** range) {
    CHECK((kwargs == nullptr && inputs == nullptr && num_inputs == 0));
    calls.push_back(std::string("begin ") + text);
    *range = &calls;
    return 0;
}

std::int32_t refuse(const char* /*text*/, void* /*kwargs*/, void* const* /*inputs*/,
                    std::uint64_t /*num_inputs*/, void** range) {
    *range = &calls;
    return 1;
}

std::int32_t end(void* range) {
    CHECK(range == &calls);
    calls.emplace_back("end");
    return 0;
}

// No other test has ranges of torch.
struct Attached {
    explicit Attached(TorchRangeStart how = start, bool sees_workers = true) {
        calls.clear();
        TorchRange::reach(how, end, sees_workers);
    }
    Attached(const Attached&) = delete;
    Attached& operator=(const Attached&) = delete;
    ~Attached() { TorchRange::reach(nullptr, nullptr, false); }
};

constexpr Action kLongestText{.microbatch = 4294967295, .stage = 65535, .kind = Kind::B};

}  // namespace

TEST_CASE("ranges of actions and steps reach torch while it records") {
    const Attached attached;
    {
        const Range step = Range::of_step();
        const Range action(kLongestText, 7);
    }
    CHECK(calls == std::vector<std::string>{"begin pykern step",
                                            "begin pykern B s65535 mb4294967295 dev7", "end",
                                            "end"});
}

TEST_CASE("without a profile torch is not called") {
    {
        const Attached attached;
    }
    const Range step = Range::of_step();
    const Range action(kLongestText, 0);
    TorchRange::tell(Timeline({{{kLongestText, 0, 1}}}));
    CHECK(calls.empty());
    CHECK_FALSE(TorchRange::misses_workers());
}

TEST_CASE("a range outlives its profile") {
    calls.clear();
    {
        TorchRange::reach(start, end, true);
        const Range action(kLongestText, 0);
        TorchRange::reach(nullptr, nullptr, false);
    }
    CHECK(calls.back() == "end");
}

TEST_CASE("a range that torch refuses is left out") {
    const Attached attached(refuse);
    {
        const Range action(kLongestText, 0);
    }
    CHECK(calls.empty());
}

TEST_CASE("a caller tells the actions of its workers") {
    const Attached attached(start, false);
    CHECK(TorchRange::misses_workers());
    const Action forward{.microbatch = 1, .stage = 0, .kind = Kind::F};
    TorchRange::tell(Timeline({{}, {{forward, 0, 800}, {kLongestText, 1200, 1e15}}}));
    CHECK(calls == std::vector<std::string>{
                       "begin pykern F s0 mb1 dev1 at 0 for 800 ns", "end",
                       "begin pykern B s65535 mb4294967295 dev1 at 1200 for 999999999998800 ns",
                       "end"});
}
