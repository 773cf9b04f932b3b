// A model runs on the thread that calls it. Verilator's runtime asks the system on how many processors it might run, in order to start
// threads, and how large its stack may become, at a time when a daemon in its sandbox asks and starts nothing any more. It is compiled so
// that its questions come here (build.rs).
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>

extern "C" int millrace_one_processor(pthread_t, size_t, cpu_set_t* set) noexcept {
    CPU_ZERO(set);
    CPU_SET(0, set);
    return 0;
}

extern "C" int millrace_no_limit(int, rlimit*) noexcept {
    return -1;
}
