// All that decides who comes before whom, as text, for another judge than this driver.
#pragma once

#include <cstddef>
#include <sstream>
#include <string>
#include <vector>

#include "driver_model/fake.hpp"

namespace pykern::fake {

// One line each, where s is a stream, e an event, a an address and n a number of bytes:
//   work FUNCTION s, record e s, wait e s, host event e, host stream s, host all,
//   free s a n, forget a n, graph, node EDGE..., told TEXT.
// After work and node, the accesses: r or w, a, n. Launches write the address of their graph.
class Log {
   public:
    void keep(bool kept) { kept_ = kept; }
    std::string text() const { return text_.str(); }

    template <class... Words>
    void add(const char* what, const Words&... words) {
        add(std::vector<FakeAccess>(), what, words...);
    }

    template <class... Words>
    void add(const std::vector<FakeAccess>& accesses, const char* what, const Words&... words) {
        if (!kept_) return;
        text_ << what;
        ((text_ << ' ' << words), ...);
        for (const FakeAccess& access : accesses) {
            text_ << (access.writes != 0 ? " w " : " r ") << access.address << ' ' << access.bytes;
        }
        text_ << '\n';
    }

   private:
    bool kept_ = false;
    std::ostringstream text_;
};

}  // namespace pykern::fake
