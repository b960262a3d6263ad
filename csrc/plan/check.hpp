// Check: the proof that a plan can run. Every plan passes it, whoever made it.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "plan/index.hpp"
#include "plan/memory.hpp"
#include "plan/plan.hpp"

namespace pykern {

struct Rule {
    const char* id;
    const char* name;
};

// Ids are stable. docs/plan-rules.md explains each.
inline constexpr Rule kInRange{"P001", "numbers in range"};
inline constexpr Rule kAuthored{"P002", "kinds that a row may hold"};
inline constexpr Rule kOnce{"P003", "every action once"};
inline constexpr Rule kPlaced{"P004", "on the stage's device"};
inline constexpr Rule kComplete{"P005", "complete"};
inline constexpr Rule kOrdered{"P006", "ordered on each device"};
inline constexpr Rule kNoDeadlock{"P007", "free of deadlock"};
inline constexpr Rule kOneBackward{"P008", "one backward"};
inline constexpr Rule kOverlap{"P009", "overlapped pairs"};
inline constexpr Rule kFits{"P010", "within the memory cap"};
inline constexpr Rule kSlots{"P011", "ring slots never reused early"};

// A plan that breaks a rule, and where. The message holds the table with an arrow at the place.
class PlanError : public std::runtime_error {
   public:
    PlanError(Rule rule, const Plan& plan, int device, std::size_t position,
              const std::string& what);

    const char* rule() const { return rule_; }
    int device() const { return device_; }
    // Index in the device's row; the row's length where something is missing.
    std::size_t position() const { return position_; }

   private:
    const char* rule_;
    int device_;
    std::size_t position_;
};

// Throws PlanError at the first rule that the plan breaks. Linear in the number of actions; a plan
// that has passed is not checked again.
void check(const Plan& plan);
// The plan, which has passed `check`.
Plan checked(Plan plan);

// `check` in two halves, for who walks over the plan anyway: every rule but P006 and P007, and
// those for a walk that ran so many actions of each row. A walk that ends breaks neither.
Index check_rows(const Plan& plan);
void require_finished(const Plan& plan, const Index& index,
                      const std::vector<std::size_t>& reached);

// Throws PlanError where a device would hold more than `cap_bytes` at once. The plan must have
// passed `check`.
void check_memory(const Plan& plan, const Memory& memory, double cap_bytes);

}  // namespace pykern
