#include "exec/stream_order.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <tuple>
#include <utility>

#include "plan/check.hpp"
#include "plan/check_lowered.hpp"
#include "plan/inputs.hpp"
#include "plan/text.hpp"

namespace pykern {

namespace {

// Nodes are numbered as they stand in the plan: the actions, row after row, then the copies, lane
// after lane.
using Node = std::size_t;

struct NodeEdge {
    Node from;
    Node to;
};

// The nodes of a plan before they are in an order, and what each waits for.
class Network {
   public:
    Network(const LoweredPlan& lowered, const CellSlots& slots)
        : plan_(lowered.plan), index_(lowered.plan), slots_(slots) {
        add_actions();
        add_copies(lowered);
        for (Node node = 0; node < copies_begin_; ++node) add_inputs(node);
        add_handovers();
    }

    std::vector<CopyStream> copy_streams;
    std::vector<Task> nodes;
    std::vector<NodeEdge> edges;

   private:
    void add_actions() {
        for (int device = 0; device < plan_.num_devices(); ++device) {
            for (const Action& action : plan_.rows()[static_cast<std::size_t>(device)]) {
                nodes.push_back({.action = action, .stream = device, .slot = slots_.of(action)});
            }
        }
        copies_begin_ = nodes.size();
        forward_copy_.assign(copies_begin_, kNone);
        backward_copy_.assign(copies_begin_, kNone);
        chain_streams();
    }

    // Within a stream each waits for the one before.
    void chain_streams() {
        for (Node node = 1; node < copies_begin_; ++node) {
            if (nodes[node].stream == nodes[node - 1].stream) {
                edges.push_back({.from = node - 1, .to = node});
            }
        }
    }

    void add_copies(const LoweredPlan& lowered) {
        std::map<std::tuple<int, int, Kind>, int> numbers;
        std::vector<Node> last;
        for (const Lane& lane : lowered.lanes) {
            for (const Copy& copy : lane.copies) {
                const Kind kind = copy.action.kind;
                const auto [entry, is_new] = numbers.try_emplace(
                    {lane.link.from, lane.link.to, kind}, static_cast<int>(numbers.size()));
                const auto number = static_cast<std::size_t>(entry->second);
                const Node node = nodes.size();
                if (is_new) {
                    copy_streams.push_back({lane.link.from, lane.link.to, kind});
                } else {
                    edges.push_back({.from = last[number], .to = node});
                }
                last.resize(copy_streams.size());
                last[number] = node;
                nodes.push_back({.action = copy.action,
                                 .stream = plan_.num_devices() + entry->second,
                                 .slot = copy.slot});
                const Node source = source_of(copy.action);
                (kind == Kind::COPY_F ? forward_copy_ : backward_copy_)[source] = node;
                edges.push_back({.from = source, .to = node});
                if (copy.freed_by) edges.push_back({.from = node_of(*copy.freed_by), .to = node});
            }
        }
    }

    // Results of a neighbour stage on another device come by copy, all others directly.
    void add_inputs(Node node) {
        const Action action = nodes[node].action;
        for_each_input(action, index_, [&](Action input, int position) {
            const auto from = static_cast<Node>(position);
            if (nodes[from].stream == nodes[node].stream) return;
            const bool forward = action.kind == Kind::F && input.stage + 1 == action.stage;
            const bool backward = (action.kind == Kind::B || action.kind == Kind::I) &&
                                  input.stage == action.stage + 1;
            Node bringer = from;
            if (forward) bringer = forward_copy_[from];
            if (backward) bringer = backward_copy_[from];
            edges.push_back({.from = bringer, .to = node});
        });
    }

    // The next F in a slot waits for the copies of what the slot held before.
    void add_handovers() {
        const auto num_stages = static_cast<std::size_t>(plan_.num_stages());
        std::vector<std::vector<Node>> holders(num_stages * plan_.placement().replicas().size());
        for (Node node = 0; node < copies_begin_; ++node) {
            const Action action = nodes[node].action;
            if (action.kind != Kind::F) continue;
            const int replica = plan_.placement().replica_of(action.microbatch);
            auto& ring = holders[static_cast<std::size_t>(replica) * num_stages + action.stage];
            const auto slot = static_cast<std::size_t>(nodes[node].slot);
            if (ring.size() <= slot) ring.resize(slot + 1, kNone);
            if (ring[slot] != kNone) add_handover(ring[slot], node);
            ring[slot] = node;
        }
    }

    void add_handover(Node former, Node next) {
        if (forward_copy_[former] != kNone) {
            edges.push_back({.from = forward_copy_[former], .to = next});
        }
        for (const Kind kind : {Kind::B, Kind::I}) {
            Action action = nodes[former].action;
            action.kind = kind;
            const int position = index_.at(action);
            if (position < 0) continue;
            const Node copy = backward_copy_[static_cast<Node>(position)];
            if (copy != kNone) edges.push_back({.from = copy, .to = next});
        }
    }

    Node node_of(Action action) const { return static_cast<Node>(index_.at(action)); }

    Node source_of(Action copy) const {
        Action source = copy;
        source.kind = copy.kind == Kind::COPY_F ? Kind::F : Kind::B;
        if (index_.at(source) < 0) source.kind = Kind::I;
        return node_of(source);
    }

    static constexpr Node kNone = static_cast<Node>(-1);

    const Plan& plan_;
    const Index index_;
    const CellSlots& slots_;
    Node copies_begin_ = 0;
    // By action: the copy of what it gives.
    std::vector<Node> forward_copy_;
    std::vector<Node> backward_copy_;
};

// The nodes in the order in which they would start if all took equally long.
std::vector<Node> in_order(const Network& network, const Plan& plan) {
    const std::size_t num_nodes = network.nodes.size();
    std::vector<int> waiting_for(num_nodes, 0);
    std::vector<std::size_t> begin(num_nodes + 1, 0);
    for (const NodeEdge& edge : network.edges) {
        ++waiting_for[edge.to];
        ++begin[edge.from + 1];
    }
    for (Node node = 0; node < num_nodes; ++node) begin[node + 1] += begin[node];
    std::vector<Node> successors(network.edges.size());
    std::vector<std::size_t> next(begin.begin(), begin.end() - 1);
    for (const NodeEdge& edge : network.edges) successors[next[edge.from]++] = edge.to;

    std::vector<Node> order;
    order.reserve(num_nodes);
    for (Node node = 0; node < num_nodes; ++node) {
        if (waiting_for[node] == 0) order.push_back(node);
    }
    for (std::size_t done = 0; done < order.size(); ++done) {
        for (std::size_t i = begin[order[done]]; i < begin[order[done] + 1]; ++i) {
            if (--waiting_for[successors[i]] == 0) order.push_back(successors[i]);
        }
    }
    if (order.size() == num_nodes) return order;
    const auto stuck = static_cast<std::size_t>(
        std::ranges::find_if(waiting_for, [](int count) { return count > 0; }) -
        waiting_for.begin());
    throw PlanError(kSlots, plan, network.nodes[stuck].stream, 0,
                    to_text(network.nodes[stuck].action) +
                        " waits for a slot whose output cannot leave before it");
}

// Leaves out what follows from other waits. It goes through the tasks in their order and knows of
// each stream how far every other one must have come.
class Waits {
   public:
    explicit Waits(std::size_t num_streams, std::vector<int> num_waiters)
        : num_waiters_(std::move(num_waiters)),
          now_(num_streams, Clock(num_streams, 0)),
          at_end_(num_waiters_.size()),
          place_(num_waiters_.size()) {}

    // Appends what the task has to wait for, of tasks on other streams.
    void add(TaskNumber task, int stream, std::vector<TaskNumber> inputs,
             const std::vector<Task>& tasks, std::vector<TaskNumber>& waits) {
        Clock& clock = now_[static_cast<std::size_t>(stream)];
        // A later input may follow from nothing that an earlier one does not, but not the reverse.
        std::ranges::sort(inputs, std::greater<>());
        for (const TaskNumber input : inputs) {
            const auto from = static_cast<std::size_t>(tasks[input].stream);
            if (clock[from] < place_[input]) {
                waits.push_back(input);
                for (std::size_t i = 0; i < clock.size(); ++i) {
                    clock[i] = std::max(clock[i], at_end_[input][i]);
                }
            }
            if (--num_waiters_[input] == 0) at_end_[input] = {};
        }
        place_[task] = ++clock[static_cast<std::size_t>(stream)];
        if (num_waiters_[task] > 0) at_end_[task] = clock;
    }

   private:
    // How many tasks of each stream are known to have ended.
    using Clock = std::vector<std::uint32_t>;

    std::vector<int> num_waiters_;
    std::vector<Clock> now_;
    std::vector<Clock> at_end_;
    std::vector<std::uint32_t> place_;
};

}  // namespace

StreamOrder::StreamOrder(const LoweredPlan& lowered)
    : plan_(lowered.plan), slots_((check(lowered), slots_of(lowered))) {
    Network network(lowered, slots_);
    const std::vector<Node> order = in_order(network, plan_);
    std::vector<TaskNumber> number_of(order.size());
    for (const Node node : order) {
        number_of[node] = static_cast<TaskNumber>(tasks_.size());
        tasks_.push_back(network.nodes[node]);
    }
    copy_streams_ = std::move(network.copy_streams);

    std::vector<std::vector<TaskNumber>> inputs(tasks_.size());
    std::vector<int> num_waiters(tasks_.size(), 0);
    for (const NodeEdge& edge : network.edges) {
        const TaskNumber from = number_of[edge.from];
        const TaskNumber to = number_of[edge.to];
        if (tasks_[from].stream == tasks_[to].stream) continue;
        inputs[to].push_back(from);
        ++num_waiters[from];
    }
    Waits waits(static_cast<std::size_t>(num_streams()), std::move(num_waiters));
    for (TaskNumber task = 0; task < tasks_.size(); ++task) {
        wait_begin_.push_back(waits_.size());
        waits.add(task, tasks_[task].stream, std::move(inputs[task]), tasks_, waits_);
    }
    wait_begin_.push_back(waits_.size());
    for (const TaskNumber task : waits_) tasks_[task].awaited = true;
}

int StreamOrder::device_of_stream(int stream) const {
    if (stream < num_devices()) return stream;
    return copy_streams_[static_cast<std::size_t>(stream - num_devices())].sender;
}

}  // namespace pykern
