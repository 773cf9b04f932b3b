/*
 * An external engine for fio: jobs on volumes of a running daemon, by libmillrace.
 *
 *   fio --ioengine=external:libmillrace-fio.so --filename=VOLUME --rw=randread --bs=4k --iodepth=32 ...
 *
 * The volume is the job's only file; its daemon is that of MILLRACE_RUN_DIR. fio's buffers are the space's own, so nothing is copied; with
 * iomem=... they are not, and the library copies.
 *
 * fio's packages come without headers, and its structures have no stable layout: what we touch of them is declared below as it is in
 * fio 3.39 for 64-bit Linux, the version of Debian 13. fio refuses an engine of another interface version; and we look, before anything is
 * used, whether fio's structures are where we think.
 */
#include <errno.h>
#include <millrace.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Tests say another. */
#ifndef INTERFACE_VERSION
#define INTERFACE_VERSION 36
#endif

/* Offsets in bytes in `struct thread_data`, `struct io_u` and `struct fio_file`. */
enum {
    THREAD_IODEPTH = 208,          /* unsigned int */
    THREAD_FILES = 188144,         /* pointer to pointers to files */
    THREAD_BUFFER = 188368,        /* pointer, which we set; its length is the size_t after it */
    THREAD_BUFFER_SIZE = 188376,
    THREAD_ENGINE = 189376,        /* pointer to the engine's operations */
    THREAD_ENGINE_DATA = 189392,   /* pointer, ours */
    UNIT_DIRECTION = 44,           /* int: enum below */
    UNIT_OFFSET = 72,              /* unsigned long long */
    UNIT_BUFFER = 104,             /* pointer */
    UNIT_LENGTH = 112,             /* unsigned long long */
    UNIT_RESIDUAL = 136,           /* unsigned long long */
    UNIT_ERROR = 144,              /* unsigned int */
    FILE_NUMBER = 36,              /* int */
    FILE_NAME = 40,                /* string */
    FILE_SIZE = 48,                /* uint64_t */
};

#define FIELD(type, base, offset) (*(type *)((char *)(base) + (offset)))

enum { READ, WRITE, TRIM, SYNC, DATASYNC };
enum { DONE = 0, QUEUED = 1, BUSY = 2 };
enum { RAW = 2, DISKLESS = 4, NO_EXTEND = 8, NO_DISK_STATISTICS = 16, NO_OFFLOAD = 0x8000, OTHER_MEMORY_TOO = 0x20000 };

/* The operations that an engine has; those without a signature are not used here. */
struct operations {
    void *list[2];
    const char *name;
    int version, flags;
    void *handle;
    void *setup;
    int (*init)(void *thread);
    void *post_init, *prep;
    int (*queue)(void *thread, void *unit);
    int (*commit)(void *thread);
    int (*getevents)(void *thread, unsigned int min, unsigned int max, const struct timespec *timeout);
    void *(*event)(void *thread, int number);
    void *error_details, *cancel;
    void (*cleanup)(void *thread);
    int (*open_file)(void *thread, void *file);
    int (*close_file)(void *thread, void *file);
    int (*invalidate)(void *thread, void *file);
    void *unlink_file;
    int (*get_file_size)(void *thread, void *file);
    void *prepopulate_file, *terminate;
    int (*iomem_alloc)(void *thread, size_t size);
    void (*iomem_free)(void *thread);
    void *io_u_init, *io_u_free, *zones[6], *placement;
    int option_size;
    void *options;
};

_Static_assert(sizeof(struct operations) == 288, "the operations of interface version 36");

extern struct operations ioengine;

/*
 * A job's space. Requests that have ended: `have` of them, of which fio was told of those before `next`, in its last call from `told` on. And those
 * that are still to be begun: up to `batch` go together, while fio has ends to take, for which it comes back.
 */
struct job {
    fastpath_t *space;
    unsigned int depth, have, next, told;
    int direct;
    unsigned int batch, held;
    struct fastpath_request wait[8];
    struct fastpath_completion done[];
};

enum { MOST_HELD = sizeof ((struct job *)0)->wait / sizeof(struct fastpath_request) };

static struct job *of(void *thread)
{
    return FIELD(struct job *, thread, THREAD_ENGINE_DATA);
}

/* Leaves out the ends that fio was told of. */
static void forget_told(struct job *job)
{
    job->have -= job->next;
    memmove(job->done, job->done + job->next, job->have * sizeof job->done[0]);
    job->next = 0;
}

/* Begins what is held, as much as there is room for. What is refused has ended. */
static void submit(struct job *job)
{
    unsigned int begun = 0;
    while (begun < job->held) {
        int accepted = fastpath_submit_many(job->space, job->wait + begun, job->held - begun);
        if (accepted == -EAGAIN)
            break;
        if (accepted < 0) {
            if (job->have == job->depth)
                forget_told(job);
            job->done[job->have++] = (struct fastpath_completion){ .tag = job->wait[begun].tag, .result = accepted };
            accepted = 1;
        }
        begun += (unsigned int)accepted;
    }
    job->held -= begun;
    memmove(job->wait, job->wait + begun, job->held * sizeof job->wait[0]);
}

static int complain(const char *what)
{
    fprintf(stderr, "millrace: %s\n", what);
    return 1;
}

static fastpath_t *open_volume(void *file, size_t buffer, unsigned int depth, unsigned int flags)
{
    struct fastpath_options options = { .size = sizeof options, .depth = depth, .flags = flags };
    const char *volume = FIELD(const char *, file, FILE_NAME);
    fastpath_t *space = fastpath_open(volume, buffer, &options);
    if (!space && fastpath_error_number() == EACCES) {
        /* Who may only read does: writes end with EROFS. */
        options.flags |= FP_READ_ONLY;
        space = fastpath_open(volume, buffer, &options);
    }
    if (!space)
        complain(fastpath_error());
    return space;
}

static int get_file_size(void *thread, void *file)
{
    (void)thread;
    if (FIELD(int, file, FILE_NUMBER) != 0)
        return complain("a job has one volume: filename=VOLUME");
    fastpath_t *space = open_volume(file, 4096, 1, FP_READ_ONLY);
    int64_t size = space ? fastpath_volume_size(space) : -1;
    fastpath_free(space);
    if (size < 0)
        return 1;
    FIELD(uint64_t, file, FILE_SIZE) = (uint64_t)size;
    return 0;
}

static int begin(void *thread, size_t buffer)
{
    if (FIELD(struct operations *, thread, THREAD_ENGINE) != &ioengine)
        return complain("this fio is none that the engine knows: 3.39 as Debian 13 packages it");
    unsigned int depth = FIELD(unsigned int, thread, THREAD_IODEPTH);
    if (depth < 1 || depth > 1023)
        return complain("iodepth is 1 to 1023");
    struct job *job = calloc(1, sizeof *job + depth * sizeof job->done[0]);
    if (!job)
        return complain("no memory");
    job->depth = depth, job->direct = buffer > 0;
    job->batch = depth / 4 < MOST_HELD ? depth / 4 : MOST_HELD;
    job->space = open_volume(FIELD(void **, thread, THREAD_FILES)[0], buffer, depth, 0);
    if (!job->space) {
        free(job);
        return 1;
    }
    FIELD(struct job *, thread, THREAD_ENGINE_DATA) = job;
    return 0;
}

static int iomem_alloc(void *thread, size_t size)
{
    size_t wanted = FIELD(size_t, thread, THREAD_BUFFER_SIZE);
    if (wanted > size || size - wanted > 2u << 20)
        return complain("this fio is none that the engine knows: 3.39 as Debian 13 packages it");
    if (begin(thread, size))
        return 1;
    FIELD(void *, thread, THREAD_BUFFER) = fastpath_buffer(of(thread)->space);
    return 0;
}

static void iomem_free(void *thread)
{
    /* It goes with the space. */
    FIELD(void *, thread, THREAD_BUFFER) = NULL;
}

static int nothing(void *thread, void *file)
{
    (void)thread, (void)file;
    return 0;
}

/* fio's own memory, iomem=...: the space was not opened for it. */
static int open_file(void *thread, void *file)
{
    (void)file;
    return of(thread) ? 0 : begin(thread, 0);
}

static int queue(void *thread, void *unit)
{
    struct job *job = of(thread);
    int direction = FIELD(int, unit, UNIT_DIRECTION);
    if (direction == SYNC || direction == DATASYNC) {
        submit(job);
        FIELD(unsigned int, unit, UNIT_ERROR) = (unsigned int)-fastpath_flush(job->space, FP_BLOCKING);
        return DONE;
    }
    if (direction != READ && direction != WRITE && direction != TRIM) {
        FIELD(unsigned int, unit, UNIT_ERROR) = EINVAL;
        return DONE;
    }
    if (job->held == MOST_HELD)
        submit(job);
    if (job->held == MOST_HELD)
        return BUSY;
    job->wait[job->held++] = (struct fastpath_request){
        .operation = direction == READ ? FP_READ : direction == WRITE ? FP_WRITE : FP_DEALLOCATE,
        .flags = job->direct ? FP_DIRECT : 0,
        .offset = FIELD(unsigned long long, unit, UNIT_OFFSET),
        .size = FIELD(unsigned long long, unit, UNIT_LENGTH),
        .buffer = FIELD(void *, unit, UNIT_BUFFER),
        .tag = (uint64_t)(uintptr_t)unit,
    };
    return QUEUED;
}

static int commit(void *thread)
{
    struct job *job = of(thread);
    if (job->held >= job->batch || job->have == job->next)
        submit(job);
    return 0;
}

/* fio mostly asks for one: what else has ended is kept for its next calls, since a look at the space costs as much for one as for all. */
static int getevents(void *thread, unsigned int min, unsigned int max, const struct timespec *timeout)
{
    struct job *job = of(thread);
    int wait = timeout ? (int)(timeout->tv_sec * 1000 + timeout->tv_nsec / 1000000) : -1;
    if (job->have == job->next || job->have - job->next < min) {
        submit(job);
        forget_told(job);
        do {
            int more = fastpath_reap(job->space, job->done + job->have, job->depth - job->have, job->have < min ? wait : 0);
            if (more < 0 && job->have == 0)
                return more;
            if (more <= 0)
                break;
            job->have += (unsigned int)more;
        } while (job->have < min);
    }
    job->told = job->next;
    job->next += max < job->have - job->next ? max : job->have - job->next;
    return (int)(job->next - job->told);
}

static void *event(void *thread, int number)
{
    struct job *job = of(thread);
    struct fastpath_completion *done = &job->done[job->told + (unsigned int)number];
    void *unit = (void *)(uintptr_t)done->tag;
    if (done->result < 0)
        FIELD(unsigned int, unit, UNIT_ERROR) = (unsigned int)-done->result;
    else
        FIELD(unsigned long long, unit, UNIT_RESIDUAL) =
            FIELD(unsigned long long, unit, UNIT_LENGTH) - (unsigned long long)done->result;
    return unit;
}

static void cleanup(void *thread)
{
    struct job *job = of(thread);
    FIELD(struct job *, thread, THREAD_ENGINE_DATA) = NULL;
    if (job)
        fastpath_free(job->space);
    free(job);
}

struct operations ioengine = {
    .name = "millrace",
    .version = INTERFACE_VERSION,
    .flags = RAW | DISKLESS | NO_EXTEND | NO_DISK_STATISTICS | NO_OFFLOAD | OTHER_MEMORY_TOO,
    .queue = queue,
    .commit = commit,
    .getevents = getevents,
    .event = event,
    .cleanup = cleanup,
    .open_file = open_file,
    .close_file = nothing,
    .invalidate = nothing,
    .get_file_size = get_file_size,
    .iomem_alloc = iomem_alloc,
    .iomem_free = iomem_free,
};
