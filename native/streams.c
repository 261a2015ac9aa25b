/* Which launches are finished, per stream. A stream that reports completion says nothing about another stream, unless it waited
 * for an event of that stream.
 *
 * Every operation of interest (launch, recorded event, wait for an event) takes a number from one clock per process. A stream is
 * idle when it is known to be finished up to its last launch; the process is idle when all its streams are. */
#include "gate.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { STREAMS = 256, EVENTS = 1024, WAITS = 8, DEPTH = 8 };

struct stream {
    uint64_t handle, context, owner; /* owner: the thread, for per-thread default streams */
    uint64_t last_launch, done;
    int device, used, blocking;
    unsigned next_wait;
    struct {
        uint64_t at, until; /* after operation `at`, everything up to `until` of the other stream is finished */
        int stream;
    } waits[WAITS];
};
static struct stream streams[STREAMS];
static struct {
    const void *event;
    uint64_t at;
    int stream;
} events[EVENTS];
static uint64_t clock_now, overflow_launch[AIM_DEVICES];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

enum { LEGACY = 1, THREAD = 2 };

static uint64_t thread_id(void)
{
    static __thread uint64_t id;
    if (id == 0)
        id = (uint64_t)syscall(SYS_gettid);
    return id;
}

static struct stream *find(const struct aim_driver *driver, int device, const void *handle, int make)
{
    uint64_t name = (uint64_t)(uintptr_t)handle, context = 0, owner = 0;
    if (name == LEGACY)
        name = 0;
    if (name <= THREAD) {
        context = INSIDE(driver->context());
        owner = name == THREAD ? thread_id() : 0;
    }
    uint64_t hash = (name ^ context ^ owner << 32 ^ (uint64_t)device) * 0x9e3779b97f4a7c15u >> 48;
    struct stream *reusable = NULL;
    for (unsigned i = 0; i < STREAMS; i++) {
        struct stream *stream = &streams[(hash + i) % STREAMS];
        if (stream->used && stream->handle == name && stream->device == device && stream->owner == owner &&
            (name > THREAD || stream->context == context))
            return stream;
        if (reusable == NULL && (!stream->used || stream->handle == UINT64_MAX) && stream->done >= stream->last_launch)
            reusable = stream;
        if (!stream->used)
            break;
    }
    if (!make || reusable == NULL)
        return NULL;
    memset(reusable, 0, sizeof *reusable);
    *reusable = (struct stream){.handle = name, .owner = owner, .device = device, .used = 1};
    reusable->context = name > THREAD ? INSIDE(driver->context()) : context;
    reusable->blocking = name <= THREAD || INSIDE(driver->stream_is_blocking((void *)(uintptr_t)handle));
    return reusable;
}

static int is_idle(int device)
{
    for (unsigned i = 0; i < STREAMS; i++)
        if (streams[i].used && streams[i].device == device && streams[i].done < streams[i].last_launch)
            return 0;
    return overflow_launch[device] == 0;
}

static void finish(struct stream *stream, uint64_t until, int depth)
{
    if (until <= stream->done)
        return;
    stream->done = until;
    for (unsigned i = 0; depth < DEPTH && i < WAITS; i++)
        if (stream->waits[i].at != 0 && stream->waits[i].at <= until) {
            stream->waits[i].at = 0;
            finish(&streams[stream->waits[i].stream], stream->waits[i].until, depth + 1);
        }
}

void aim_stream_launched(const struct aim_driver *driver, int device, const void *handle, struct aim_process *slot)
{
    pthread_mutex_lock(&mutex);
    struct stream *stream = find(driver, device, handle, 1);
    clock_now++;
    if (stream != NULL)
        stream->last_launch = clock_now;
    else if (device >= 0 && device < AIM_DEVICES)
        overflow_launch[device] = clock_now; /* more streams than places: only the device can report completion */
    add(&slot->launched, 1);
    pthread_mutex_unlock(&mutex);
}

uint64_t aim_stream_clock(void)
{
    pthread_mutex_lock(&mutex);
    uint64_t now = clock_now;
    pthread_mutex_unlock(&mutex);
    return now;
}

/* Everything up to `until` is finished: of a stream, or of the context (all streams of the device, where there are none). The
 * legacy default stream waits for all streams that were not made non-blocking. */
void aim_stream_finished(const struct aim_driver *driver, int device, const void *handle, int whole, uint64_t until,
                         struct aim_process *slot)
{
    if (device < 0 || device >= AIM_DEVICES)
        return;
    uint64_t context = whole || (uintptr_t)handle <= LEGACY ? INSIDE(driver->context()) : 0;
    pthread_mutex_lock(&mutex);
    if (whole || (uintptr_t)handle <= LEGACY) {
        for (unsigned i = 0; i < STREAMS; i++)
            if (streams[i].used && streams[i].device == device && streams[i].context == context &&
                (whole || streams[i].blocking))
                finish(&streams[i], until, 0);
        if (whole && overflow_launch[device] <= until)
            overflow_launch[device] = 0;
    } else {
        struct stream *stream = find(driver, device, handle, 0);
        if (stream != NULL)
            finish(stream, until, 0);
    }
    if (is_idle(device))
        store(&slot->done, load(&slot->launched));
    pthread_mutex_unlock(&mutex);
}

static size_t place(const void *event) { return (size_t)(((uintptr_t)event * 0x9e3779b97f4a7c15u) >> 40) % EVENTS; }

void aim_stream_event_recorded(const struct aim_driver *driver, int device, const void *event, const void *handle)
{
    pthread_mutex_lock(&mutex);
    const struct stream *stream = find(driver, device, handle, 1);
    events[place(event)].event = stream == NULL ? NULL : event;
    events[place(event)].at = ++clock_now;
    events[place(event)].stream = stream == NULL ? 0 : (int)(stream - streams);
    pthread_mutex_unlock(&mutex);
}

void aim_stream_event_finished(int device, const void *event, struct aim_process *slot)
{
    pthread_mutex_lock(&mutex);
    if (events[place(event)].event == event)
        finish(&streams[events[place(event)].stream], events[place(event)].at, 0);
    if (device >= 0 && device < AIM_DEVICES && is_idle(device))
        store(&slot->done, load(&slot->launched));
    pthread_mutex_unlock(&mutex);
}

void aim_stream_waits(const struct aim_driver *driver, int device, const void *handle, const void *event)
{
    pthread_mutex_lock(&mutex);
    struct stream *stream = find(driver, device, handle, 1);
    if (stream != NULL && events[place(event)].event == event) {
        unsigned at = stream->next_wait++ % WAITS;
        stream->waits[at].at = ++clock_now;
        stream->waits[at].until = events[place(event)].at;
        stream->waits[at].stream = events[place(event)].stream;
    }
    pthread_mutex_unlock(&mutex);
}

/* The handle may be given out again. What was launched there runs on; the device, or the bound for unwaited work, ends it. */
void aim_stream_destroyed(const struct aim_driver *driver, const void *handle)
{
    pthread_mutex_lock(&mutex);
    for (int device = 0; device < AIM_DEVICES; device++) {
        struct stream *stream = (uintptr_t)handle <= THREAD ? NULL : find(driver, device, handle, 0);
        if (stream != NULL)
            stream->handle = UINT64_MAX;
    }
    pthread_mutex_unlock(&mutex);
}

void aim_streams_after_fork(void)
{
    pthread_mutex_init(&mutex, NULL);
    memset(streams, 0, sizeof streams);
    memset(events, 0, sizeof events);
    memset(overflow_launch, 0, sizeof overflow_launch);
}
