/* A program of the kind that the library is for: client COMMAND, on $MILLRACE_VOLUME. */
#include <millrace.h>

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                                              \
    do {                                                                                                              \
        if (!(condition)) {                                                                                           \
            fprintf(stderr, "%s:%d: %s; last error %d: %s\n", __FILE__, __LINE__, #condition, fastpath_error_number(), \
                    fastpath_error());                                                                                \
            exit(1);                                                                                                  \
        }                                                                                                             \
    } while (0)

/* All that the header declares is in the library. */
void *const all[] = {
    (void *)fastpath_open, (void *)fastpath_alloc, (void *)fastpath_free, (void *)fastpath_buffer,
    (void *)fastpath_buffer_size, (void *)fastpath_block_size, (void *)fastpath_volume_size, (void *)fastpath_read,
    (void *)fastpath_write, (void *)fastpath_seek, (void *)fastpath_pread, (void *)fastpath_pwrite,
    (void *)fastpath_preadv, (void *)fastpath_pwritev, (void *)fastpath_flush, (void *)fastpath_deallocate,
    (void *)fastpath_write_zeroes, (void *)fastpath_polling, (void *)fastpath_submit, (void *)fastpath_submit_many, (void *)fastpath_reap,
    (void *)fastpath_eventfd, (void *)fastpath_connection, (void *)fastpath_statistics, (void *)fastpath_error, (void *)fastpath_error_number,
    (void *)fastpath_strerror, (void *)fastpath_version,
};

static uint64_t state = 88172645463325252u;

static uint64_t random64(void)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static void fill(unsigned char *bytes, size_t size)
{
    for (size_t at = 0; at < size; at++)
        bytes[at] = (unsigned char)(random64() >> 32);
}

static void less_than_a_block(void)
{
    fastpath_t *fp = fastpath_alloc(65536);
    CHECK(fp && fastpath_block_size(fp) == 4096);
    unsigned char *buffer = fastpath_buffer(fp);
    CHECK(fastpath_pread(fp, buffer, 512, 0, FP_DIRECT | FP_BLOCKING) == -EINVAL);
    CHECK(fastpath_pread(fp, buffer, 4096, 512, FP_DIRECT | FP_BLOCKING) == -EINVAL);
    CHECK(fastpath_pwrite(fp, buffer, 6144, 0, FP_BLOCKING) == -EINVAL);
    CHECK(fastpath_pread(fp, buffer, 4096, 4096, FP_DIRECT | FP_BLOCKING) == 4096);
    fastpath_free(fp);
}

/* Random requests of every kind beside a copy of what the volume must hold. */
static void verify(void)
{
    const size_t size = 4 << 20;
    fastpath_t *fp = fastpath_alloc(size);
    CHECK(fp);
    size_t block = fastpath_block_size(fp), volume = (size_t)fastpath_volume_size(fp);
    unsigned char *buffer = fastpath_buffer(fp), *model = calloc(1, volume), *other = malloc(size);
    CHECK(fastpath_buffer_size(fp) >= size && model && other);
    for (int round = 0; round < 600; round++) {
        size_t blocks = 1 + random64() % (round % 8 ? 64 : size / block / 2), bytes = blocks * block;
        uint64_t offset = random64() % (volume / block - blocks) * block;
        unsigned char *place = buffer + random64() % ((size - bytes) / 4) * 4;
        unsigned flags = round % 3 ? FP_BLOCKING : 0;
        switch (random64() % 8) {
        case 0:
            fill(place, bytes);
            memcpy(model + offset, place, bytes);
            CHECK(fastpath_pwrite(fp, place, bytes, offset, FP_DIRECT | flags) == (int64_t)bytes);
            break;
        case 1:
            fill(other, bytes);
            memcpy(model + offset, other, bytes);
            CHECK(fastpath_pwrite(fp, other, bytes, offset, flags | FP_DURABLE) == (int64_t)bytes);
            break;
        case 2: { /* pieces of any length */
            fill(other, bytes);
            memcpy(model + offset, other, bytes);
            size_t first = random64() % (bytes + 1), second = random64() % (bytes - first + 1);
            struct iovec iov[] = { { other, first }, { other + first, second }, { other + first + second, bytes - first - second } };
            CHECK(fastpath_pwritev(fp, iov, 3, offset, flags) == (int64_t)bytes);
            break;
        }
        case 3:
            memset(model + offset, 0, bytes);
            CHECK(fastpath_write_zeroes(fp, offset, bytes, flags) == 0);
            break;
        case 4:
            memset(other, 0xee, bytes);
            CHECK(fastpath_seek(fp, offset) == 0);
            CHECK(fastpath_read(fp, other, bytes / block / 2 * block + block, flags) > 0);
            while (fastpath_polling(fp) > 0)
                ;
            CHECK(!memcmp(other, model + offset, bytes / block / 2 * block + block));
            break;
        case 5: {
            size_t half = blocks / 2 * block;
            struct iovec iov[] = { { place, half }, { place + half, bytes - half } };
            memset(place, 0xee, bytes);
            CHECK(fastpath_preadv(fp, iov, 2, offset, FP_DIRECT | flags) == (int64_t)bytes);
            while (fastpath_polling(fp) > 0)
                ;
            CHECK(!memcmp(place, model + offset, bytes));
            break;
        }
        case 6:
            CHECK(fastpath_flush(fp, flags) == 0);
            break;
        default:
            memset(other, 0xee, bytes);
            CHECK(fastpath_pread(fp, other, bytes, offset, FP_BLOCKING) == (int64_t)bytes);
            CHECK(!memcmp(other, model + offset, bytes));
        }
        int left;
        while ((left = fastpath_polling(fp)) > 0)
            ;
        CHECK(left == 0);
    }
    CHECK(fastpath_pread(fp, other, block, volume, FP_BLOCKING) == -ENXIO);
    for (uint64_t at = 0; at < volume; at += size) {
        CHECK(fastpath_pread(fp, buffer, size, at, FP_BLOCKING | FP_DIRECT) == (int64_t)size);
        CHECK(!memcmp(buffer, model + at, size));
    }
    free(model), free(other);
    fastpath_free(fp);
}

static void refusals(void)
{
    CHECK(!fastpath_open("none", 4096, NULL) && fastpath_error_number() == ENOENT && strstr(fastpath_error(), "none"));
    struct fastpath_options options = { .size = 1 };
    CHECK(!fastpath_open(NULL, 4096, &options) && fastpath_error_number() == EINVAL);
    options.size = 31;
    CHECK(!fastpath_open(NULL, 4096, &options) && fastpath_error_number() == EINVAL);
    /* Of a later header: what the library does not know must not be asked for. */
    struct {
        struct fastpath_options known;
        uint64_t more;
    } later = { .known = { .size = sizeof later }, .more = 1 };
    CHECK(!fastpath_open(NULL, 4096, &later.known) && fastpath_error_number() == EINVAL);
    later.more = 0, later.known.depth = 1;
    fastpath_t *deep = fastpath_open(NULL, 4096, &later.known);
    CHECK(deep);
    fastpath_free(deep);
    options.size = sizeof options, options.run_dir = "/nonexistent";
    CHECK(!fastpath_open(NULL, 4096, &options) && fastpath_error_number() == ENOENT && strstr(fastpath_error(), "apps.sock"));
    options.run_dir = NULL, options.depth = 2, options.flags = FP_READ_ONLY;
    fastpath_t *fp = fastpath_open(NULL, 8192, &options);
    CHECK(fp);
    char *buffer = fastpath_buffer(fp), mine[512];
    CHECK(fastpath_pread(fp, mine, 512, 0, FP_DIRECT | FP_BLOCKING) == -EINVAL);
    CHECK(fastpath_pread(fp, buffer + 2, 512, 0, FP_DIRECT | FP_BLOCKING) == -EINVAL);
    CHECK(fastpath_pread(fp, buffer + 8192 - 256, 512, 0, FP_DIRECT | FP_BLOCKING) == -EINVAL);
    CHECK(fastpath_pread(fp, NULL, 512, 0, FP_BLOCKING) == -EINVAL);
    CHECK(fastpath_pread(fp, mine, 512, 0, 1u << 31) == -EINVAL);
    CHECK(fastpath_pread(fp, mine, 512, 1, FP_BLOCKING) == -EINVAL);
    CHECK(fastpath_pread(fp, mine, 512, UINT64_MAX - 511, FP_BLOCKING) == -ENXIO);
    CHECK(fastpath_pwrite(fp, mine, 512, 0, FP_BLOCKING) == -EROFS);
    CHECK(fastpath_pwrite(fp, mine, 512, 0, 0) == 512);
    int left;
    while ((left = fastpath_polling(fp)) > 0)
        ;
    CHECK(left == -EROFS && fastpath_polling(fp) == 0);
    struct fastpath_request request = { .operation = 77, .size = 512, .buffer = mine };
    CHECK(fastpath_submit(fp, &request) == -EINVAL && fastpath_submit(fp, NULL) == -EINVAL);
    CHECK(fastpath_eventfd(fp) == -EINVAL && fastpath_statistics(fp, NULL, 0) == -EINVAL);
    CHECK(fastpath_pread(NULL, mine, 512, 0, 0) == -EINVAL);
    request.operation = FP_READ;
    CHECK(!fastpath_submit(fp, &request) && !fastpath_submit(fp, &request) && fastpath_submit(fp, &request) == -EAGAIN);
    struct fastpath_completion done[2];
    int taken = 0;
    while (taken < 2) {
        int more = fastpath_reap(fp, done + taken, 2 - (unsigned)taken, -1);
        CHECK(more > 0);
        taken += more;
    }
    CHECK(done[0].result == 512 && done[1].result == 512);
    CHECK(fastpath_reap(fp, done, 2, -1) == 0);
    fastpath_free(fp);
    fastpath_free(NULL);
    CHECK(strstr(fastpath_strerror(-EROFS), "written") && *fastpath_version());
}

/* Takes so many ends, one by one; their tags as bits. */
static unsigned ended(fastpath_t *fp, int count)
{
    unsigned tags = 0;
    struct fastpath_completion done;
    while (count-- > 0) {
        CHECK(fastpath_reap(fp, &done, 1, -1) == 1 && done.result > 0 && done.tag < 32 && !(tags >> done.tag & 1));
        tags |= 1u << done.tag;
    }
    CHECK(fastpath_reap(fp, &done, 1, -1) == 0);
    return tags;
}

/* Several at once: as many as there is room for and none is wrong before, from the first on. */
static void many(void)
{
    enum { MANY = 8 };
    struct fastpath_options options = { .size = sizeof options, .depth = MANY };
    fastpath_t *fp = fastpath_open(NULL, MANY << 12, &options);
    CHECK(fp);
    unsigned char *buffer = fastpath_buffer(fp), mine[1024], back[4096];
    struct iovec iov[] = { { mine, 512 }, { mine + 512, 512 } };
    struct fastpath_request requests[MANY + 2];
    fill(buffer, MANY << 12), fill(mine, sizeof mine);
    for (unsigned at = 0; at < MANY + 2; at++)
        requests[at] = (struct fastpath_request){
            .operation = FP_WRITE, .flags = FP_DIRECT, .offset = (uint64_t)at << 12, .size = 4096,
            .buffer = buffer + ((at % MANY) << 12), .tag = at,
        };
    requests[1].flags = 0, requests[1].iov = iov, requests[1].iovcnt = 2;
    CHECK(fastpath_submit_many(fp, requests, MANY + 2) == MANY);
    CHECK(fastpath_submit_many(fp, requests + MANY, 2) == -EAGAIN && fastpath_error_number() == EAGAIN);
    CHECK(ended(fp, MANY) == 0xff);
    for (unsigned at = 0; at < MANY; at++) {
        CHECK(fastpath_pread(fp, back, 4096, (uint64_t)at << 12, FP_BLOCKING) == 4096);
        CHECK(at == 1 ? !memcmp(back, mine, sizeof mine) : !memcmp(back, buffer + (at << 12), 4096));
    }
    requests[3].offset = UINT64_MAX - 4095;
    CHECK(fastpath_submit_many(fp, requests + 2, 3) == 1);
    CHECK(ended(fp, 1) == 1u << 2);
    CHECK(fastpath_submit_many(fp, requests + 3, 2) == -ENXIO);
    CHECK(fastpath_submit_many(fp, NULL, 0) == 0 && fastpath_submit_many(fp, NULL, 1) == -EINVAL);
    CHECK(fastpath_submit_many(NULL, requests, 1) == -EINVAL);
    CHECK(ended(fp, 0) == 0);
    fastpath_free(fp);
}

/* Requests of all sizes in flight, told apart by tags, waited for by the event fd; or of an engine's own space, which has none. */
static void tags(int engine)
{
    enum { DEPTH = 32 };
    const int TOTAL = engine ? 1000 : 5000;
    struct fastpath_options options = { .size = sizeof options, .depth = DEPTH };
    options.flags = FP_STATISTICS | (engine ? FP_ENGINE : FP_EVENTS);
    fastpath_t *fp = fastpath_open(NULL, DEPTH << 16, &options);
    CHECK(fp);
    unsigned char *buffer = fastpath_buffer(fp), *mine = malloc(DEPTH << 16);
    int begun = 0, ended = 0, busy[DEPTH] = { 0 };
    struct pollfd events = { .fd = fastpath_eventfd(fp), .events = POLLIN };
    CHECK(mine && (engine ? events.fd == -EINVAL : events.fd >= 0));
    while (ended < TOTAL) {
        for (int slot = 0; slot < DEPTH && begun < TOTAL; slot++) {
            if (busy[slot])
                continue;
            int direct = begun % 2;
            struct fastpath_request request = {
                .operation = begun % 3 ? FP_WRITE : FP_READ,
                .flags = direct ? FP_DIRECT : 0,
                .offset = (uint64_t)slot << 16,
                .size = 512 + random64() % 127 * 512,
                .buffer = (direct ? buffer : mine) + (slot << 16),
                .tag = (uint64_t)begun << 8 | (unsigned)slot,
            };
            CHECK(fastpath_submit(fp, &request) == 0);
            busy[slot] = 1, begun++;
        }
        struct fastpath_completion done[8];
        int taken = fastpath_reap(fp, done, 8, engine ? 30000 : 0);
        CHECK(taken >= engine);
        if (taken == 0) {
            uint64_t count;
            CHECK(poll(&events, 1, 30000) == 1 && (read(events.fd, &count, 8) == 8 || errno == EAGAIN));
        }
        for (int at = 0; at < taken; at++) {
            int slot = done[at].tag & 0xff;
            CHECK(slot < DEPTH && busy[slot] && done[at].result >= 512 && done[at].time_ns > 0);
            busy[slot] = 0, ended++;
        }
    }
    struct fastpath_statistics statistics;
    CHECK(fastpath_statistics(fp, &statistics, 1) == 0);
    CHECK(statistics.reads.requests + statistics.writes.requests == (uint64_t)TOTAL && statistics.writes.errors == 0);
    CHECK(statistics.reads.min_ns <= statistics.reads.p50_ns && statistics.reads.p50_ns <= statistics.reads.p99_ns);
    CHECK(statistics.reads.p999_ns <= statistics.reads.max_ns && statistics.reads.bytes >= 512 * statistics.reads.requests);
    CHECK(fastpath_statistics(fp, &statistics, 0) == 0 && statistics.reads.requests == 0);
    free(mine);
    fastpath_free(fp);
}

static fastpath_t *shared;

static void *thread(void *argument)
{
    size_t number = (size_t)argument, size = 512 * (1 + number);
    unsigned char *out = malloc(size), *in = malloc(size);
    CHECK(out && in);
    for (int round = 0; round < 500; round++) {
        uint64_t offset = ((uint64_t)number << 20) + (uint64_t)round % 16 * size;
        memset(out, (int)(number * 16 + (size_t)round), size);
        CHECK(fastpath_pwrite(shared, out, size, offset, FP_BLOCKING) == (int64_t)size);
        CHECK(fastpath_pread(shared, in, size, offset, FP_BLOCKING) == (int64_t)size);
        CHECK(!memcmp(in, out, size));
    }
    free(out), free(in);
    return NULL;
}

static void threads(void)
{
    struct fastpath_options options = { .size = sizeof options, .depth = 3 };
    pthread_t all_threads[6];
    shared = fastpath_open(NULL, 4096, &options);
    CHECK(shared);
    for (size_t number = 0; number < 6; number++)
        CHECK(!pthread_create(&all_threads[number], NULL, thread, (void *)number));
    for (int number = 0; number < 6; number++)
        pthread_join(all_threads[number], NULL);
    fastpath_free(shared);
}

/* Writes all the time, until it is killed; or until the daemon gives up on it, if it has nothing better in its queues than noise. */
static void load(int noise)
{
    fastpath_t *fp = fastpath_alloc(1 << 20);
    CHECK(fp);
    char *buffer = fastpath_buffer(fp), *from = NULL, *to = NULL;
    char line[256];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps)) {
        char *start, *end;
        if (sscanf(line, "%p-%p", (void **)&start, (void **)&end) == 2 && start <= buffer && buffer < end)
            from = start, to = end;
    }
    CHECK(from);
    fclose(maps);
    puts("loaded");
    fflush(stdout);
    for (int round = 0; !noise || round < 3000; round++) {
        struct fastpath_request request = {
            .operation = FP_WRITE, .flags = FP_DIRECT, .size = 64 << 10, .buffer = buffer, .offset = (uint64_t)(round % 8) << 17,
        };
        struct fastpath_completion done[64];
        fastpath_submit(fp, &request);
        fastpath_reap(fp, done, 64, 0);
        /* The queues, their lists and everything else that the daemon may look at, also before it looks. */
        for (char *at = from; noise && at < to && at < from + (4 << 20); at += 8 * (1 + random64() % 64)) {
            uint64_t word = random64();
            memcpy(at, &word, 8);
        }
    }
}

/* A volume that takes one request a second: what is not waited for any longer goes on, and is not told of twice. */
static void late(void)
{
    struct fastpath_options options = { .size = sizeof options, .timeout_ms = 100 };
    fastpath_t *fp = fastpath_open(NULL, 8192, &options);
    CHECK(fp);
    char *buffer = fastpath_buffer(fp), mine[512];
    for (int round = 0; round < 2; round++)
        CHECK(fastpath_pread(fp, mine, 512, 0, 0) == 512);
    CHECK(fastpath_pread(fp, buffer, 512, 0, FP_DIRECT | FP_BLOCKING) == -ETIMEDOUT);
    CHECK(fastpath_pread(fp, mine, 512, 0, FP_BLOCKING) == -ETIMEDOUT);
    int left = fastpath_polling(fp);
    CHECK(left > 0);
    /* Until then the buffer is the daemon's. */
    while ((left = fastpath_polling(fp)) > 0)
        usleep(1000);
    CHECK(left == 0);
    CHECK(fastpath_deallocate(fp, 0, 512, FP_BLOCKING | FP_DURABLE) == -EINVAL);
    struct fastpath_request request = { .operation = FP_DEALLOCATE, .flags = FP_DURABLE, .size = 512 };
    CHECK(fastpath_submit(fp, &request) == -EINVAL);
    CHECK(fastpath_write_zeroes(fp, 0, 512, FP_DURABLE) == 0);
    while ((left = fastpath_polling(fp)) > 0)
        usleep(1000);
    CHECK(left == 0);
    fastpath_free(fp);
}

static void *long_read(void *unused)
{
    char mine[512];
    (void)unused;
    CHECK(fastpath_pread(shared, mine, 512, 0, FP_BLOCKING) == 512);
    return &shared;
}

/* The same volume: one thread waits for the last of several requests, another sleeps for the end of the first, which has no tag. */
static void beside(void)
{
    struct fastpath_options options = { .size = sizeof options, .flags = FP_EVENTS };
    pthread_t waiter;
    uint64_t events;
    shared = fastpath_open(NULL, 8192, &options);
    CHECK(shared);
    char *buffer = fastpath_buffer(shared);
    struct pollfd told = { .fd = fastpath_eventfd(shared), .events = POLLIN };
    for (int round = 0; round < 4; round++)
        CHECK(fastpath_pread(shared, buffer, 512, 0, FP_DIRECT) == 512);
    CHECK(!pthread_create(&waiter, NULL, long_read, NULL));
    int before = 4;
    while (before > 2) {
        CHECK(poll(&told, 1, 60000) == 1);
        CHECK(read(told.fd, &events, 8) == 8 || errno == EAGAIN);
        int now = fastpath_polling(shared);
        CHECK(now >= 0 && now <= before);
        before = now;
    }
    CHECK(pthread_tryjoin_np(waiter, NULL) == EBUSY);
    CHECK(!pthread_join(waiter, NULL));
    fastpath_free(shared);
}

static volatile int first_is_over;

static void *read_twice(void *unused)
{
    char mine[512];
    (void)unused;
    CHECK(fastpath_pread(shared, mine, 512, 0, FP_BLOCKING) == 512);
    first_is_over = 1;
    CHECK(fastpath_pread(shared, mine, 512, 0, FP_BLOCKING) == 512);
    return &shared;
}

/* A volume that takes two requests at once, and then one a second. A request without a tag ends before a thread begins to wait for another one:
   who sleeps for it is told while that thread waits. */
static void before(void)
{
    struct fastpath_options options = { .size = sizeof options, .flags = FP_EVENTS };
    pthread_t waiter;
    shared = fastpath_open(NULL, 8192, &options);
    CHECK(shared);
    struct pollfd told = { .fd = fastpath_eventfd(shared), .events = POLLIN };
    CHECK(fastpath_pread(shared, fastpath_buffer(shared), 512, 0, FP_DIRECT) == 512);
    CHECK(!pthread_create(&waiter, NULL, read_twice, NULL));
    while (!first_is_over)
        usleep(1000);
    /* By now it sleeps. */
    usleep(200000);
    CHECK(poll(&told, 1, 300) == 1);
    CHECK(fastpath_polling(shared) == 0);
    CHECK(!pthread_join(waiter, NULL));
    fastpath_free(shared);
}

/* With one descriptor more each time: until there are enough for a space, it is said that they are too few. */
static void few(void)
{
    struct fastpath_options options = { .size = sizeof options, .flags = FP_EVENTS };
    struct rlimit limit;
    fastpath_t *fp = NULL;
    int refusals = 0, lowest = dup(0);
    CHECK(lowest >= 0 && !close(lowest) && !getrlimit(RLIMIT_NOFILE, &limit));
    for (limit.rlim_cur = (rlim_t)lowest; !fp; limit.rlim_cur++) {
        CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
        fp = fastpath_open(NULL, 4096, &options);
        if (!fp) {
            CHECK(fastpath_error_number() == EMFILE && *fastpath_error());
            refusals++;
        }
    }
    CHECK(refusals > 3);
    char mine[512];
    CHECK(fastpath_pread(fp, mine, 512, 0, FP_BLOCKING) == 512);
    fastpath_free(fp);
}

/* What is forked has the queue's memory as well: it is told that the space is not its own, and takes nothing of it. */
static void forked(void)
{
    fastpath_t *fp = fastpath_alloc(8192);
    CHECK(fp);
    char *buffer = fastpath_buffer(fp);
    for (int round = 0; round < 3; round++) {
        memset(buffer, 'a' + round, 512);
        CHECK(fastpath_pwrite(fp, buffer, 512, 0, FP_DIRECT | FP_BLOCKING) == 512);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            char mine[512];
            CHECK(fastpath_pread(fp, mine, 512, 0, FP_BLOCKING) == -ENODEV);
            CHECK(fastpath_pwrite(fp, mine, 512, 512, 0) == -ENODEV);
            CHECK(fastpath_volume_size(fp) == -ENODEV && fastpath_polling(fp) == 0);
            fastpath_free(fp);
            fp = fastpath_alloc(4096);
            CHECK(fp && fastpath_pread(fp, mine, 512, 0, FP_BLOCKING) == 512 && mine[0] == 'a' + round);
            fastpath_free(fp);
            exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        memset(buffer, 0, 512);
        CHECK(fastpath_pread(fp, buffer, 512, 0, FP_DIRECT | FP_BLOCKING) == 512 && buffer[0] == 'a' + round);
    }
    fastpath_free(fp);
}

static volatile int enough;

static void *read_on(void *unused)
{
    char mine[512];
    (void)unused;
    while (!enough)
        CHECK(fastpath_pread(shared, mine, 512, 0, FP_BLOCKING) == 512);
    return NULL;
}

static void *ask_on(void *unused)
{
    (void)unused;
    while (!enough)
        CHECK(fastpath_volume_size(shared) > 0);
    return NULL;
}

/* The same while other threads are in the library: what they held there nobody gives back in the child, which is told all the same. */
static void forked_beside(void)
{
    struct fastpath_options options = { .size = sizeof options, .flags = FP_STATISTICS };
    char mine[512];
    pthread_t reader, asker;
    shared = fastpath_open(NULL, 4096, &options);
    CHECK(shared && fastpath_pread(shared, mine, 512, 0, FP_BLOCKING) == 512);
    CHECK(!pthread_create(&reader, NULL, read_on, NULL) && !pthread_create(&asker, NULL, ask_on, NULL));
    for (int round = 0; round < 200; round++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            struct fastpath_request request = { .operation = FP_READ, .size = 512, .buffer = mine };
            struct fastpath_completion done;
            struct fastpath_statistics statistics;
            /* One that waits for ever is ended. */
            alarm(60);
            CHECK(fastpath_pread(shared, mine, 512, 0, FP_BLOCKING) == -ENODEV && fastpath_submit(shared, &request) == -ENODEV);
            CHECK(fastpath_submit_many(shared, &request, 1) == -ENODEV);
            CHECK(fastpath_read(shared, mine, 512, 0) == -ENODEV && fastpath_seek(shared, 0) == -ENODEV);
            CHECK(fastpath_volume_size(shared) == -ENODEV && fastpath_statistics(shared, &statistics, 0) == -ENODEV);
            CHECK(fastpath_polling(shared) == 0 && fastpath_reap(shared, &done, 1, -1) == 0);
            fastpath_free(shared);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    enough = 1;
    CHECK(!pthread_join(reader, NULL) && !pthread_join(asker, NULL));
    CHECK(fastpath_pread(shared, mine, 512, 0, FP_BLOCKING) == 512);
    fastpath_free(shared);
}

/* Gives a space back while what was forked from it goes on. */
static void left_behind(void)
{
    fastpath_t *fp = fastpath_alloc(4096);
    CHECK(fp);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        sleep(600);
        exit(0);
    }
    puts("loaded");
    fflush(stdout);
    fastpath_free(fp);
    sleep(600);
}

/* Two threads write what comes next, and try again when there is no room: every block has its turn, and none is left out. */
enum { APPENDED = 4000 };

static void *appender(void *unused)
{
    static unsigned char ones[512] = { 1 };
    (void)unused;
    for (int block = 0; block < APPENDED / 2; block++) {
        int64_t result;
        while ((result = fastpath_write(shared, ones, 512, 0)) == -EAGAIN)
            CHECK(fastpath_polling(shared) >= 0);
        CHECK(result == 512);
    }
    return NULL;
}

static void append(void)
{
    struct fastpath_options options = { .size = sizeof options, .depth = 2 };
    pthread_t both[2];
    unsigned char block[512];
    shared = fastpath_open(NULL, 4096, &options);
    CHECK(shared);
    CHECK(fastpath_write_zeroes(shared, 0, APPENDED * 512 + 512, FP_BLOCKING) == 0);
    for (int number = 0; number < 2; number++)
        CHECK(!pthread_create(&both[number], NULL, appender, NULL));
    for (int number = 0; number < 2; number++)
        pthread_join(both[number], NULL);
    while (fastpath_polling(shared) > 0)
        ;
    for (uint64_t at = 0; at < APPENDED; at++) {
        CHECK(fastpath_pread(shared, block, 512, at * 512, FP_BLOCKING) == 512);
        CHECK(block[0] == 1);
    }
    CHECK(fastpath_read(shared, block, 512, FP_BLOCKING) == 512 && block[0] == 0);
    fastpath_free(shared);
}

enum { QUIET_DEPTH = 32, QUIET_REQUESTS = 20000 };

/* So many reads and writes, direct and copied; the library is never asked to wait. */
static void without_waiting(fastpath_t *fp, int total)
{
    static unsigned char mine[QUIET_DEPTH << 12];
    const struct timespec moment = { .tv_nsec = 50000 };
    unsigned char *buffer = fastpath_buffer(fp);
    int begun = 0, ended = 0, vain = 0, busy[QUIET_DEPTH] = { 0 };
    while (ended < total) {
        for (unsigned slot = 0; slot < QUIET_DEPTH && begun < total; slot++) {
            if (busy[slot])
                continue;
            int direct = begun / 2 % 2;
            struct fastpath_request request = {
                .operation = begun % 2 ? FP_WRITE : FP_READ,
                .flags = direct ? FP_DIRECT : 0,
                .offset = (uint64_t)slot << 12,
                .size = 4096,
                .buffer = (direct ? buffer : mine) + (slot << 12),
                .tag = slot,
            };
            CHECK(fastpath_submit(fp, &request) == 0);
            busy[slot] = 1, begun++;
        }
        struct fastpath_completion done[8];
        int taken = fastpath_reap(fp, done, 8, 0);
        CHECK(taken >= 0);
        for (int at = 0; at < taken; at++) {
            CHECK(done[at].tag < QUIET_DEPTH && busy[done[at].tag] && done[at].result == 4096);
            busy[done[at].tag] = 0, ended++;
        }
        /* The daemon may want our processor; and after thousands of looks in vain the library asks whether it is still there. */
        vain = taken ? 0 : vain + 1;
        if (vain % 16 == 15)
            syscall(SYS_nanosleep, &moment, NULL);
    }
}

/* Lets `child` go on; whether it has stopped once more, with `status`. */
static int next_stop(pid_t child, int calls_too, int *status)
{
    CHECK(!ptrace(calls_too ? PTRACE_SYSCALL : PTRACE_CONT, child, NULL, NULL));
    CHECK(waitpid(child, status, 0) == child);
    return WIFSTOPPED(*status);
}

/* Whether it has stopped at the beginning of a call that counts: not of our nap above (the library's are SYS_clock_nanosleep), nor of a look at
   a clock, which is a call only where the system's clock is a bad one. */
static int begins_call(pid_t child, int status)
{
    struct __ptrace_syscall_info call;
    CHECK(WSTOPSIG(status) == (SIGTRAP | 0x80));
    CHECK(ptrace(PTRACE_GET_SYSCALL_INFO, child, sizeof call, &call) > 0);
    return call.op == PTRACE_SYSCALL_INFO_ENTRY && call.entry.nr != SYS_nanosleep && call.entry.nr != SYS_clock_gettime;
}

/* Counts the calls of the system that requests cost, from outside of the process that makes them. It stops before and after. */
static void silent(void)
{
    int status, calls = 0;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        fastpath_t *fp = fastpath_alloc(QUIET_DEPTH << 12);
        pid_t self = getpid();
        CHECK(fp && !ptrace(PTRACE_TRACEME, 0, NULL, NULL));
        without_waiting(fp, 1000);
        CHECK(!kill(self, SIGSTOP));
        without_waiting(fp, QUIET_REQUESTS);
        CHECK(!kill(self, SIGSTOP));
        fastpath_free(fp);
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
    CHECK(!ptrace(PTRACE_SETOPTIONS, child, NULL, (void *)(uintptr_t)(PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL)));
    while (next_stop(child, 1, &status) && WSTOPSIG(status) != SIGSTOP)
        calls += begins_call(child, status);
    CHECK(WIFSTOPPED(status) && !next_stop(child, 0, &status) && status == 0);
    /* One is its own stop, which tells that they are counted. */
    fprintf(stderr, "%d calls for %d requests\n", calls - 1, QUIET_REQUESTS);
    CHECK(calls >= 1 && calls - 1 < QUIET_REQUESTS / 100);
}

/* Called when what the library has kept for the thread may be gone: errors are told all the same. */
static void tell_errors(void)
{
    if (fastpath_open("none", 4096, NULL) || fastpath_error_number() <= 0)
        _exit(1);
    if (fastpath_seek(NULL, 0) != -EINVAL || fastpath_error_number() != EINVAL || !*fastpath_error())
        _exit(1);
}

static void tell_errors_of_thread(void *unused)
{
    (void)unused;
    tell_errors();
}

static void *fail_and_end(void *key)
{
    CHECK(fastpath_seek(NULL, 0) == -EINVAL && !pthread_setspecific(*(pthread_key_t *)key, key));
    return NULL;
}

/* The library is called by the destructor of a thread's key, and by a handler of the program's end, which is to come. */
static void ending(void)
{
    pthread_key_t key;
    pthread_t thread;
    CHECK(!pthread_key_create(&key, tell_errors_of_thread) && !pthread_create(&thread, NULL, fail_and_end, &key));
    CHECK(!pthread_join(thread, NULL));
    CHECK(fastpath_seek(NULL, 0) == -EINVAL && !atexit(tell_errors));
}

static void ring(int signal)
{
    (void)signal;
}

/* Signals all the time, whose handlers have calls of the system go on. */
static void ringing(void)
{
    struct sigaction action = { .sa_handler = ring, .sa_flags = SA_RESTART };
    struct itimerval often = { { 0, 2000 }, { 0, 2000 } };
    CHECK(!sigaction(SIGALRM, &action, NULL) && !setitimer(ITIMER_REAL, &often, NULL));
}

int main(int argc, char **argv)
{
    const char *command = argc > 1 ? argv[1] : "";
    if (!strcmp(command, "verify"))
        verify(), refusals(), many(), tags(0), threads(), forked(), forked_beside();
    else if (!strcmp(command, "blocks"))
        verify(), less_than_a_block();
    else if (!strcmp(command, "engine"))
        tags(1);
    else if (!strcmp(command, "load"))
        load(0);
    else if (!strcmp(command, "noise"))
        load(1);
    else if (!strcmp(command, "late"))
        late(), beside();
    else if (!strcmp(command, "before"))
        before();
    else if (!strcmp(command, "few"))
        few();
    else if (!strcmp(command, "fork"))
        left_behind();
    else if (!strcmp(command, "append"))
        append();
    else if (!strcmp(command, "silent"))
        silent();
    else if (!strcmp(command, "end"))
        ending();
    else if (!strcmp(command, "open")) {
        if (argc > 2 && !strcmp(argv[2], "with signals"))
            ringing();
        fastpath_t *fp = fastpath_alloc(4096);
        fprintf(stderr, "%s\n", fastpath_error());
        if (fp && argc > 2 && !strcmp(argv[2], "and stay"))
            sleep(600);
        return fp ? 0 : fastpath_error_number();
    } else
        return 2;
    return 0;
}
