/* Devices, contexts, streams, capture, events and launches of the software GPU.
 *
 * Each device has one queue, first come, first served; a stream is finished when its last launch is. An event that is recorded
 * on a stream that is captured belongs to the capture and must not be queried; a destroyed stream must not be used; an event
 * works with streams of its own context only. Each such use is counted. */
#include "gpu.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { STREAMS = 4096, CONTEXTS = 256, STACK = 16 };
#define FIRST_STREAM 0x5000000u
#define FIRST_CONTEXT 0xd00000u
#define PRIMARY 0xc0ffeeu

static struct stream {
    uint64_t context, end, graph, collective;
    unsigned flags;
    int live, capturing;
} streams[STREAMS];
static uint64_t used_streams;
static struct {
    int live, device;
} contexts[CONTEXTS];
static uint64_t used_contexts;
static struct stream defaults[MOST_DEVICES + CONTEXTS]; /* of the primary contexts, then of the others */
static __thread struct stream own[MOST_DEVICES];        /* per-thread default streams */
static __thread uint64_t stack[STACK];
static __thread int depth;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t own_end[MOST_DEVICES];

#define LOCKED(expression)                                                                                             \
    ({                                                                                                                 \
        pthread_mutex_lock(&mutex);                                                                                    \
        __typeof__(expression) result_ = (expression);                                                                 \
        pthread_mutex_unlock(&mutex);                                                                                  \
        result_;                                                                                                       \
    })
static void before_fork(void) { pthread_mutex_lock(&mutex); }
static void after_fork(void) { pthread_mutex_unlock(&mutex); }
__attribute__((constructor)) static void start(void) { pthread_atfork(before_fork, after_fork, after_fork); }
#define COUNT(field) __atomic_add_fetch(&state->field, 1, __ATOMIC_SEQ_CST)

/* CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES: physical devices in the order in which the program sees them. */
static const char *visible(void)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    return list != NULL ? list : getenv("HIP_VISIBLE_DEVICES");
}
int sd_devices(void)
{
    const char *list = visible();
    int count = state->devices == 0 ? 1 : (int)state->devices;
    if (list != NULL)
        for (count = *list != 0; *list != 0; list++)
            count += *list == ',';
    return count;
}
int sd_physical(int ordinal)
{
    const char *list = visible();
    for (int i = 0; list != NULL && i < ordinal; i++)
        list = strchr(list, ',') == NULL ? "0" : strchr(list, ',') + 1;
    return list == NULL ? ordinal : atoi(list);
}

uint64_t sd_primary(int ordinal) { return PRIMARY + 0x1000000ull * (uint64_t)ordinal; }
int sd_context_device(uint64_t context)
{
    if (context >= FIRST_CONTEXT && context < FIRST_CONTEXT + CONTEXTS)
        return contexts[context - FIRST_CONTEXT].device;
    return (int)((context - PRIMARY) / 0x1000000u);
}
uint64_t sd_context(void) { return depth == 0 ? sd_primary(0) : stack[depth - 1]; }
int sd_device(void) { return sd_context_device(sd_context()); }
int sd_context_push(uint64_t context) { return depth == STACK ? INVALID : (stack[depth++] = context, OK); }
uint64_t sd_context_pop(void) { return depth == 0 ? sd_primary(0) : stack[--depth]; }
int sd_context_set(uint64_t context)
{
    depth = depth == 0 ? 1 : depth;
    return stack[depth - 1] = context, OK;
}
int sd_set_device(int ordinal) { return sd_context_set(sd_primary(ordinal)); }
uint64_t sd_context_make(int ordinal)
{
    uint64_t i = __atomic_fetch_add(&used_contexts, 1, __ATOMIC_SEQ_CST);
    if (i >= CONTEXTS)
        abort();
    contexts[i].live = 1;
    contexts[i].device = ordinal;
    return FIRST_CONTEXT + i;
}
/* 1: it was there, and is not any more. */
int sd_context_end(uint64_t context)
{
    if (context < FIRST_CONTEXT || context >= FIRST_CONTEXT + CONTEXTS)
        return 0;
    return __atomic_exchange_n(&contexts[context - FIRST_CONTEXT].live, 0, __ATOMIC_SEQ_CST);
}

/* NULL: destroyed, or never made. */
static struct stream *find(void *handle)
{
    uint64_t name = (uint64_t)handle, context = sd_context();
    if (name <= 1) {
        struct stream *stream = &defaults[context >= FIRST_CONTEXT && context < FIRST_CONTEXT + CONTEXTS
                                              ? MOST_DEVICES + context - FIRST_CONTEXT
                                              : (uint64_t)sd_context_device(context)];
        __atomic_store_n(&stream->context, context, __ATOMIC_SEQ_CST);
        return stream;
    }
    if (name == 2) {
        own[sd_device()].context = context;
        return &own[sd_device()];
    }
    uint64_t i = (name - FIRST_STREAM) / 16;
    return name < FIRST_STREAM || i >= used_streams || !streams[i].live ? (COUNT(bad_streams), NULL) : &streams[i];
}

static void *make_stream(unsigned flags)
{
    static uint64_t next; /* handles are given out again as late as possible */
    uint64_t i = used_streams;
    if (used_streams < STREAMS)
        used_streams++;
    else
        for (i = next; streams[i].live;)
            if ((i = (i + 1) % STREAMS) == next)
                abort();
    next = (i + 1) % STREAMS;
    streams[i] = (struct stream){.live = 1, .flags = flags, .context = sd_context()};
    return (void *)(FIRST_STREAM + 16 * i);
}
/* Streams take memory in whole blocks, which is kept for the next ones when they are destroyed. */
static uint64_t live_streams[MOST_DEVICES], stream_memory[MOST_DEVICES];
static int take_for_streams(int device)
{
    uint64_t need = (live_streams[device] + 1) * state->stream_bytes, block = state->block_bytes == 0 ? 1 : state->block_bytes;
    need = (need + block - 1) / block * block;
    int code = need > stream_memory[device] ? sd_take(need - stream_memory[device], device) : OK;
    if (code == OK && need > stream_memory[device])
        stream_memory[device] = need;
    return code;
}
/* NULL: out of memory. */
void *sd_stream(unsigned flags)
{
    int device = sd_physical(sd_device());
    return LOCKED(take_for_streams(device) == OK ? (live_streams[device]++, make_stream(flags)) : NULL);
}
static int destroy(void *handle)
{
    struct stream *stream = find(handle);
    return stream == NULL ? BAD_HANDLE : (stream->live = 0, OK);
}
int sd_stream_destroy(void *handle)
{
    int device = sd_stream_device(handle), code = LOCKED(destroy(handle));
    if (code == OK)
        (void)LOCKED(live_streams[device]--);
    return code;
}
int sd_stream_flags(void *handle, unsigned *flags)
{
    struct stream *stream = LOCKED(find(handle));
    return stream == NULL ? BAD_HANDLE : (*flags = stream->flags, OK);
}
uint64_t sd_stream_context(void *handle)
{
    struct stream *stream = LOCKED(find(handle));
    return stream == NULL ? 0 : __atomic_load_n(&stream->context, __ATOMIC_SEQ_CST);
}
int sd_stream_device(void *handle)
{
    uint64_t context = sd_stream_context(handle);
    return sd_physical(context == 0 ? 0 : sd_context_device(context));
}

static int begin(struct stream *stream, uint64_t graph)
{
    if (stream == NULL || stream->capturing)
        return BAD_HANDLE;
    stream->capturing = 1;
    stream->graph = graph;
    return OK;
}
int sd_capture_begin(void *handle, uint64_t graph) { return LOCKED(begin(find(handle), graph)); }
static int finish(struct stream *stream, uint64_t *graph)
{
    if (stream == NULL || !stream->capturing)
        return BAD_HANDLE;
    *graph = stream->graph;
    stream->capturing = 0;
    return OK;
}
int sd_capture_end(void *handle, uint64_t *graph) { return LOCKED(finish(find(handle), graph)); }
static int is_capturing(struct stream *stream, uint64_t *graph)
{
    *graph = stream != NULL && stream->capturing ? stream->graph : 0;
    return stream != NULL && stream->capturing;
}
int sd_capturing(void *handle, uint64_t *graph) { return LOCKED(is_capturing(find(handle), graph)); }

static void raise_to(uint64_t *word, uint64_t value)
{
    uint64_t old = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    while (value > old && !__atomic_compare_exchange_n(word, &old, value, 1, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        ;
}

static void arrive(uint64_t kernel, int device)
{
    __atomic_or_fetch(&state->arrived[kernel / COLLECTIVE % COLLECTIVES], 1ull << device, __ATOMIC_SEQ_CST);
}
static void await_peers(uint64_t kernel)
{
    while (kernel >= COLLECTIVE &&
           __builtin_popcountll(__atomic_load_n(&state->arrived[kernel / COLLECTIVE % COLLECTIVES], __ATOMIC_SEQ_CST)) < 2)
        sd_pause(50000);
}

void *sd_function(const char *name) { return strcmp(name, "spin") == 0 ? SPIN : NULL; }
const void *sd_kernel(void *function, void **arguments)
{
    uint64_t ns;
    if (function != SPIN || arguments == NULL)
        return function;
    memcpy(&ns, arguments[0], sizeof ns);
    return (const void *)(ns / 1000);
}

int sd_launch(void *handle, const void *kernel)
{
    uint64_t graph = 0, name = (uint64_t)kernel;
    struct stream *stream = LOCKED(find(handle));
    if (stream == NULL)
        return BAD_HANDLE;
    if (LOCKED(is_capturing(stream, &graph)))
        return OK;
    int slot = sd_claim_slot();
    uint64_t in = COUNT(entered), block = __atomic_load_n(&state->block_launches, __ATOMIC_SEQ_CST);
    while (in < block && __atomic_load_n(&state->entered, __ATOMIC_SEQ_CST) < block)
        sd_pause(1000000);
    int device = sd_physical(sd_context_device(__atomic_load_n(&stream->context, __ATOMIC_SEQ_CST)));
    uint64_t length = name == 0 ? __atomic_load_n(&state->kernel_ns, __ATOMIC_SEQ_CST) : name % COLLECTIVE * 1000;
    uint64_t at = sd_now(), old = __atomic_load_n(&state->free_at[device], __ATOMIC_SEQ_CST), begins, ends;
    do {
        begins = old > at ? old : at;
        ends = begins + length;
    } while (!__atomic_compare_exchange_n(&state->free_at[device], &old, ends, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    __atomic_add_fetch(&state->busy_ns[device], length, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&state->processes[slot].busy_ns, length, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&state->processes[slot].launches, 1, __ATOMIC_SEQ_CST);
    uint64_t i = __atomic_fetch_add(&state->launches, 1, __ATOMIC_SEQ_CST) % LOG;
    state->log[i].at = at;
    state->log[i].begins = begins;
    state->log[i].ends = ends;
    state->log[i].device = (uint64_t)device;
    state->log[i].kernel = name;
    __atomic_store_n(&state->log[i].pid, (uint64_t)getpid(), __ATOMIC_SEQ_CST);
    if (name >= COLLECTIVE) {
        arrive(name, device);
        __atomic_store_n(&stream->collective, name, __ATOMIC_SEQ_CST);
    }
    raise_to(&stream->end, ends);
    raise_to(&own_end[device], ends);
    return OK;
}

static void sleep_until(uint64_t end)
{
    uint64_t at = sd_now();
    if (end > at)
        sd_pause(end - at);
}

int sd_synchronise(void)
{
    int device = sd_physical(sd_device());
    pthread_mutex_lock(&mutex);
    uint64_t count = used_streams, collective = __atomic_load_n(&find(NULL)->collective, __ATOMIC_SEQ_CST);
    for (uint64_t i = 0; i < count; i++)
        if (__atomic_load_n(&streams[i].collective, __ATOMIC_SEQ_CST) > collective && streams[i].live)
            collective = streams[i].collective;
    pthread_mutex_unlock(&mutex);
    await_peers(collective);
    sleep_until(__atomic_load_n(&own_end[device], __ATOMIC_SEQ_CST));
    sd_pools_synchronise();
    return OK;
}
int sd_stream_synchronise(void *handle)
{
    struct stream *stream = LOCKED(find(handle));
    if (stream == NULL)
        return BAD_HANDLE;
    await_peers(__atomic_load_n(&stream->collective, __ATOMIC_SEQ_CST));
    sleep_until(__atomic_load_n(&stream->end, __ATOMIC_SEQ_CST));
    sd_pools_synchronise();
    return OK;
}
int sd_stream_query(void *handle)
{
    struct stream *stream = LOCKED(find(handle));
    if (stream == NULL)
        return BAD_HANDLE;
    return __atomic_load_n(&stream->end, __ATOMIC_SEQ_CST) > sd_now() ? NOT_READY : OK;
}

struct event {
    uint64_t end, context, captured;
};
void *sd_event(void)
{
    struct event *event = calloc(1, sizeof *event);
    event->context = sd_context();
    COUNT(events);
    return event;
}
int sd_event_destroy(void *event)
{
    free(event);
    __atomic_sub_fetch(&state->events, 1, __ATOMIC_SEQ_CST);
    return OK;
}
int sd_event_record(void *which, void *handle)
{
    struct event *event = which;
    struct stream *stream = LOCKED(find(handle));
    uint64_t graph, at = sd_now();
    if (stream == NULL)
        return BAD_HANDLE;
    if (__atomic_load_n(&stream->context, __ATOMIC_SEQ_CST) != event->context)
        return COUNT(bad_contexts), BAD_HANDLE;
    __atomic_store_n(&event->captured, (uint64_t)LOCKED(is_capturing(stream, &graph)), __ATOMIC_SEQ_CST);
    uint64_t end = __atomic_load_n(&stream->end, __ATOMIC_SEQ_CST);
    __atomic_store_n(&event->end, end > at ? end : at, __ATOMIC_SEQ_CST);
    return OK;
}
int sd_event_query(void *which)
{
    struct event *event = which;
    if (__atomic_load_n(&event->captured, __ATOMIC_SEQ_CST))
        return COUNT(bad_captures), CAPTURE_BROKEN;
    return __atomic_load_n(&event->end, __ATOMIC_SEQ_CST) > sd_now() ? NOT_READY : OK;
}
int sd_event_wait(void *event) { return sleep_until(__atomic_load_n(&((struct event *)event)->end, __ATOMIC_SEQ_CST)), OK; }
int sd_stream_wait(void *handle, void *event)
{
    struct stream *stream = LOCKED(find(handle));
    if (stream == NULL)
        return BAD_HANDLE;
    raise_to(&stream->end, __atomic_load_n(&((struct event *)event)->end, __ATOMIC_SEQ_CST));
    return OK;
}
float sd_event_elapsed(void *from, void *to)
{
    uint64_t a = __atomic_load_n(&((struct event *)from)->end, __ATOMIC_SEQ_CST);
    uint64_t b = __atomic_load_n(&((struct event *)to)->end, __ATOMIC_SEQ_CST);
    return (float)((double)(b - a) / 1e6);
}
