/*
 * FastPath: a volume of a running Millrace daemon for a program without a virtual machine.
 *
 * Program and daemon share memory. A request is an entry in a queue there, its end another one: no system call for either. See
 * fastpath(3) and docs/fastpath.md.
 *
 * Every function may be called from any thread. A space has one lock: the fastest is one space for each thread.
 *
 * What can fail returns a negative number of errno.h, and fastpath_error() says more:
 *
 *   -EAGAIN     as many requests are in progress, or as many completions not taken, as the space holds: poll, and reap those with tags, then
 *               try again. Of fastpath_open: too many programs stand at the daemon's door
 *   -EINVAL     not whole blocks, no memory, memory of the wrong kind, unknown flags
 *   -ENXIO      past the volume's end, as it was when the space was opened or fastpath_volume_size() last asked
 *   -EROFS      the volume is read-only, or is for this program
 *   -ENOSPC     no room below the volume. Of fastpath_open: the daemon has no room for so large a buffer beside those that it has
 *   -EIO        its medium failed
 *   -ENODEV     the daemon has stopped, or has ended the space: it took the volume back, for instance from a user who may not have it any
 *               more, or the space's controller had failed, as when an engine ended with its worker. Or this process was forked from the
 *               one that opened the space. Free the space and open another
 *   -EBUSY      somebody else has the volume: a guest reserves it, or a virtio disk shows it. It may pass
 *   -ENOMEM     no memory to share
 *   -EMFILE     of fastpath_open: this process has as many descriptors as it may (RLIMIT_NOFILE), and each space takes several
 *   -ENFILE     of fastpath_open: the system has as many files open as it may (fs.file-max)
 *   -ETIMEDOUT  a request that was waited for took longer than the space's timeout, and is not told of again; what it did, or may do yet, is
 *               unknown. Memory of an FP_DIRECT request stays the daemon's until fastpath_polling() says that none is in progress; other
 *               memory is not touched any more. Of fastpath_open: the daemon did not answer in time. Where others left no room for the
 *               request until then, nothing of it was begun, and fastpath_error() says so
 *   -ENOENT     no such volume, or no daemon with this run directory
 *   -ECONNREFUSED no daemon answers in this run directory any more, or it hung up again and again without an answer
 *   -EACCES     this user may not open the volume, or not in this way; or the run directory, which nobody has named, may be another user's
 *   -EDQUOT     this user has as many spaces as it may have
 *   -EOPNOTSUPP FP_ENGINE, and the daemon has no engine, or others have all of its spaces; or what an engine cannot do
 */

#ifndef MILLRACE_H
#define MILLRACE_H

/* Made of src/ffi.rs of the crate millrace-fastpath: what is said here is said there. */

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

// Flag of a request: the memory is in the space's buffer. The daemon moves the bytes there, nobody copies.
#define FP_DIRECT 1

// Flag of a request: return when it has ended.
#define FP_BLOCKING 2

// Flag of a write, and of zeroes: when it has ended, it outlives a loss of power. Not of a deallocation (-EINVAL).
#define FP_DURABLE 4

// Flag of a space: nothing will be written.
#define FP_READ_ONLY 1

// Flag of a space: completions signal an event fd, see fastpath_eventfd().
#define FP_EVENTS 2

// Flag of a space: measure requests' times, see fastpath_statistics().
#define FP_STATISTICS 4

// Flag of a space: no queue, requests go to the front of the daemon's engine (docs/hardware.md), at most 32 at a time, each a system call;
// not with FP_EVENTS, and without fastpath_deallocate(). -EOPNOTSUPP where there is none, or none free.
#define FP_ENGINE 8

// Operation of a request.
#define FP_READ 0

// Operation of a request.
#define FP_WRITE 1

// Operation of a request: see fastpath_flush().
#define FP_FLUSH 2

// Operation of a request: see fastpath_deallocate().
#define FP_DEALLOCATE 3

// Operation of a request: see fastpath_deallocate().
#define FP_WRITE_ZEROES 4

// What is behind a fastpath_t: the library's.
struct fastpath;

// A space: a controller of this program's own in the daemon, a queue pair, and a buffer.
typedef struct fastpath fastpath_t;

// What a space is to be. A later library may know more fields, behind these, and goes on to take structures without them.
struct fastpath_options {
    // sizeof(struct fastpath_options)
    size_t size;
    // The daemon's run directory; NULL: $MILLRACE_RUN_DIR, or where this user's daemon has it.
    const char *run_dir;
    // Requests that may be in progress, 1 to 1023; 0: 128.
    unsigned int depth;
    // FP_READ_ONLY, FP_EVENTS, FP_STATISTICS, FP_ENGINE.
    unsigned int flags;
    // Longest wait for the daemon, and of a blocking request; 0: 30 seconds.
    unsigned int timeout_ms;
    // Not looked at: programs of before have left anything there.
    unsigned int reserved;
};

// A request with a tag: any number may be in flight, and each end is told apart.
struct fastpath_request {
    // FP_READ, FP_WRITE, FP_FLUSH, FP_DEALLOCATE or FP_WRITE_ZEROES.
    unsigned int operation;
    // FP_DIRECT, FP_DURABLE.
    unsigned int flags;
    // First byte on the volume.
    uint64_t offset;
    // Bytes, unless there is an iov.
    uint64_t size;
    // The memory, unless there is an iov.
    void *buffer;
    // Pieces of memory, or NULL.
    const struct iovec *iov;
    // How many pieces.
    unsigned int iovcnt;
    // Yours.
    uint64_t tag;
};

// The end of a request with a tag.
struct fastpath_completion {
    // The request's.
    uint64_t tag;
    // Bytes, or a negative number of errno.h.
    int64_t result;
    // How long it took, of a space with FP_STATISTICS.
    uint64_t time_ns;
};

// What requests of one kind took; times to one part in eight.
struct fastpath_latencies {
    uint64_t requests;
    uint64_t errors;
    uint64_t bytes;
    uint64_t min_ns;
    uint64_t mean_ns;
    uint64_t p50_ns;
    uint64_t p90_ns;
    uint64_t p99_ns;
    uint64_t p999_ns;
    uint64_t max_ns;
};

// What requests took.
struct fastpath_statistics {
    struct fastpath_latencies reads;
    struct fastpath_latencies writes;
    struct fastpath_latencies others;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Opens a volume by its name (NULL: $MILLRACE_VOLUME), with a zeroed buffer of at least `size` bytes. `options` may be NULL. NULL when it
// fails: fastpath_error() and fastpath_error_number() say why.
fastpath_t *fastpath_open(const char *volume, size_t size, const struct fastpath_options *options);

// fastpath_open(NULL, size, NULL).
fastpath_t *fastpath_alloc(size_t size);

// Gives everything back: the buffer is not there any more. Requests in progress may be carried out or not, and their memory is not touched
// any more. No other call on the space may be under way. NULL is nothing.
void fastpath_free(fastpath_t *fp);

// The buffer for FP_DIRECT, page-aligned.
void *fastpath_buffer(const fastpath_t *fp);

// The buffer's length in bytes.
size_t fastpath_buffer_size(const fastpath_t *fp);

// Bytes of a block: requests are whole blocks at whole blocks.
unsigned int fastpath_block_size(const fastpath_t *fp);

// The volume's size in bytes, as it is now: asks the daemon. Of a volume that has grown, what is new may be used from then on, and not
// before (-ENXIO).
int64_t fastpath_volume_size(const fastpath_t *fp);

// Of a space with FP_EVENTS: a descriptor for poll(2) that becomes readable when something has finished, and now and then when nothing has.
// Read its 8 bytes, then poll the space until nothing comes. It is the space's: do not close it.
//
// A daemon that has ended, or has ended the space, signals nothing: the space sees that when it is polled. Who only sleeps watches
// fastpath_connection() as well, or polls the space by a timer.
int fastpath_eventfd(const fastpath_t *fp);

// A descriptor for poll(2) that hangs up (POLLHUP, which needs no asking for; POLLRDHUP) when the daemon has stopped, taken the volume
// back, or ended the space because its controller had failed: what is in progress then ends with -ENODEV when the space is polled, a
// hundredth of a second later at most; of a space without FP_EVENTS, after some thousands of polls in vain. It is the space's: do not read,
// write or close it.
int fastpath_connection(const fastpath_t *fp);

// Reads at the space's position, which moves on by `size` when the request is accepted, and only then: threads that share it leave
// nothing out; one that fails later has moved it. With FP_BLOCKING: bytes moved, always `size`. Without: `size`, as soon as the request is
// accepted, and fastpath_polling() tells of its end. The memory must be left alone until then.
//
// The memory of an FP_DIRECT request lies in the space's buffer at a multiple of 4 bytes; other memory is copied. A request of any length
// is made into as many commands as it takes, and ends when the last one has; there is no order between requests that are in progress.
int64_t fastpath_read(fastpath_t *fp, void *buffer, size_t size, unsigned int flags);

// As fastpath_read(), but writes.
int64_t fastpath_write(fastpath_t *fp, const void *buffer, size_t size, unsigned int flags);

// Where fastpath_read() and fastpath_write() go on; 0 at first.
int fastpath_seek(fastpath_t *fp, uint64_t offset);

// As fastpath_read(), but at an offset of the volume.
int64_t fastpath_pread(fastpath_t *fp, void *buffer, size_t size, uint64_t offset, unsigned int flags);

// As fastpath_write(), but at an offset of the volume.
int64_t fastpath_pwrite(fastpath_t *fp, const void *buffer, size_t size, uint64_t offset, unsigned int flags);

// As fastpath_pread(), but with up to 1024 pieces of memory; with FP_DIRECT each piece is whole blocks.
int64_t fastpath_preadv(fastpath_t *fp, const struct iovec *iov, int iovcnt, uint64_t offset, unsigned int flags);

// As fastpath_pwrite(), but with up to 1024 pieces of memory; with FP_DIRECT each piece is whole blocks.
int64_t fastpath_pwritev(fastpath_t *fp, const struct iovec *iov, int iovcnt, uint64_t offset, unsigned int flags);

// When it has ended, all writes that had ended before it began are durable.
int fastpath_flush(fastpath_t *fp, unsigned int flags);

// The blocks' contents are not needed any more.
int fastpath_deallocate(fastpath_t *fp, uint64_t offset, uint64_t size, unsigned int flags);

// The blocks read as zeroes from now on.
int fastpath_write_zeroes(fastpath_t *fp, uint64_t offset, uint64_t size, unsigned int flags);

// Goes on with what is in progress, without waiting. How many requests of the calls without tags are in progress still, or, once, the error
// of the first that failed since the last call. Those that were waited for too long (-ETIMEDOUT) count as well; their errors are not told again.
// Tagged completions it leaves where they are: they have their room until fastpath_reap() takes them.
int fastpath_polling(fastpath_t *fp);

// Begins a request with a tag. The structure and its iov are done with on return, the memory is not.
int fastpath_submit(fastpath_t *fp, const struct fastpath_request *request);

// Begins several requests with tags, in order, at less cost than one by one: how many were accepted, from the first on, each as a whole,
// and of the others nothing was done. When the first is not accepted, why, as of fastpath_submit(). That one after it is not, its own
// submission tells: most often there was no more room.
int fastpath_submit_many(fastpath_t *fp, const struct fastpath_request *requests, unsigned int count);

// Goes on with what is in progress and takes up to `max` completions; how many. Waits up to `timeout_ms` (0: not at all, negative: for
// ever) for the first one while anything is in progress.
int fastpath_reap(fastpath_t *fp, struct fastpath_completion *completions, unsigned int max, int timeout_ms);

// Of a space with FP_STATISTICS: what requests took since it was opened or cleared. `statistics` may be NULL.
int fastpath_statistics(fastpath_t *fp, struct fastpath_statistics *statistics, int clear);

// This thread's last error, in words that name what failed. Valid until this thread's next error.
const char *fastpath_error(void);

// This thread's last error as a positive number.
int fastpath_error_number(void);

// What an error number means here; `error` may be negative.
const char *fastpath_strerror(int error);

// The library's version.
const char *fastpath_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* MILLRACE_H */
