// Says to Valgrind between which steps to count, and under which name to write the count.
#include <valgrind/callgrind.h>

extern "C" {
void recorder_begin() {
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

void recorder_end(const char* name) {
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
}
}
