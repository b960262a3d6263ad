// Watchdog: tells of a wait that takes too long, where the waiting thread itself cannot.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace pykern {

// "1.5 s", as messages have it.
std::string seconds(std::int64_t ns);

// Writes a text to a descriptor, as far as that takes it.
void write_to(int file, const std::string& text);

// A thread that looks now and then whether another one still waits. The first look behind the end
// of the patience writes a message, once for each wait.
//
//     Watchdog watchdog(60s, STDERR_FILENO, [](std::int64_t ns) { return "..."; });
//     {
//         const Watchdog::Wait wait(&watchdog);
//         lock.lock();
//     }
//
// One thread at a time may wait.
class Watchdog {
   public:
    // Gives the message for a wait of so many nanoseconds. The watchdog's thread calls it, and the
    // wait does not end meanwhile.
    using Tell = std::function<std::string(std::int64_t ns)>;

    // `file` is a descriptor. Throws std::system_error where the system refuses the thread.
    Watchdog(std::chrono::nanoseconds patience, int file, Tell tell);
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;
    ~Watchdog();

    // The calling thread waits as long as this object lives. Without a watchdog nobody looks.
    class [[nodiscard]] Wait {
       public:
        explicit Wait(Watchdog* watchdog);
        Wait(const Wait&) = delete;
        Wait& operator=(const Wait&) = delete;
        ~Wait();

       private:
        Watchdog* watchdog_;
    };

   private:
    void loop();

    std::chrono::nanoseconds patience_;
    int file_;
    Tell tell_;

    std::mutex mutex_;
    std::condition_variable closed_;
    bool closing_ = false;       // guarded by mutex_
    bool waiting_ = false;       // guarded by mutex_
    std::int64_t since_ns_ = 0;  // while waiting, until it has been told; guarded by mutex_
    bool told_ = false;          // guarded by mutex_
    std::thread thread_;         // the last member, since it uses the others
};

}  // namespace pykern
