#include <doctest/doctest.h>

#include <bit>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "exec/streams.hpp"
#include "fake_world.hpp"
#include "plan/generate.hpp"

using namespace pykern;

namespace {

// A client that moves a number from place to place and leaves another GPU's context current.
class Wanderer final : public StreamClient {
   public:
    explicit Wanderer(const Plan& plan)
        : lanes_(std::make_shared<Lanes>(std::vector<LaneName>{{.gpu = 0}, {.gpu = 1}})),
          job(plan, lanes_) {
        fake_allow_undeclared(1);
        to.resize(job.order().tasks().size());
        for (const auto& [gpu, primary] : lanes_->primaries()) {
            streams_.push_back(cuda::make_stream(primary.get()));
            callers_[gpu] = streams_.back().get();
        }
    }

    void issue() {
        fake_begin_step();
        Dispatch(job, callers_, *this, false, nullptr, nullptr).run();
        fake_run_all();
    }

    static constexpr std::uint64_t kSent = 12345;

   private:
    bool run(TaskNumber number, Transfers& transfers) noexcept override {
        const int lane = job.order().tasks()[number].stream;
        cuda::CUcontext current = nullptr;
        cuda::api().cuCtxGetCurrent(&current);
        num_lost += current == lanes_->primary(lane) ? 0 : 1;
        cuda::api().cuCtxSetCurrent(lanes_->primary(1 - lane));
        ++num_runs;
        transfers = {{.to = std::bit_cast<cuda::CUdeviceptr>(&to[number]),
                      .from = std::bit_cast<cuda::CUdeviceptr>(&from_),
                      .bytes = sizeof from_}};
        return true;
    }

    std::shared_ptr<Lanes> lanes_;
    std::vector<cuda::Stream> streams_;
    std::map<int, cuda::CUstream> callers_;
    std::uint64_t from_ = kSent;

   public:
    StreamJob job;
    std::vector<std::uint64_t> to;  // by task that has given a copy something to move
    int num_runs = 0;
    int num_lost = 0;  // runs that did not find their lane's context
};

}  // namespace

TEST_CASE("a client finds its lane's context, and copies move what it has said") {
    const FakeWorld world(2);
    Wanderer client(by_slots(Placement::linear(2), 3, 1, 2));
    client.issue();
    const StreamOrder& order = client.job.order();
    int num_compute = 0;
    for (TaskNumber task = 0; task < order.tasks().size(); ++task) {
        if (!order.is_compute(order.tasks()[task])) continue;
        ++num_compute;
        const bool carries = client.job.carrier_of(task) != StreamJob::kNoTask;
        CHECK(client.to[task] == (carries ? Wanderer::kSent : 0));
    }
    CHECK(client.num_runs == num_compute);
    CHECK(client.num_lost == 0);
}

TEST_CASE("without a replay the client runs actions that have a launch as well") {
    const FakeWorld world(2);
    Wanderer client(by_slots(Placement::linear(2), 3, 1, 2));
    int num_launches = 0;
    for (TaskNumber task = 0; task < client.job.order().tasks().size(); ++task) {
        if (!client.job.order().is_compute(client.job.order().tasks()[task])) continue;
        client.job.set_launch(task, {});
        ++num_launches;
    }
    client.issue();
    CHECK(client.num_runs == num_launches);
}

TEST_CASE("lanes reach the GPUs that the driver says, each way by itself, and their own") {
    const FakeWorld world(2);
    fake_set_peer(0, 1, 0);
    const Lanes lanes({{.gpu = 0}, {.gpu = 1}, {.gpu = 1}});
    CHECK_FALSE(lanes.reaches(0, 1));
    CHECK(lanes.reaches(1, 0));
    CHECK(lanes.reaches(1, 2));
}
