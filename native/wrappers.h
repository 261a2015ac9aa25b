/* Patterns that the functions of CUDA and HIP share. A file that includes this defines DRIVER, the struct of its interface. */
#ifndef AIM_WRAPPERS_H
#define AIM_WRAPPERS_H

#include "aim.h"

#define P(x) ((uint64_t)(uintptr_t)(x))
#define DEVICE() aim_current_device(&DRIVER)
/* A process that asks how much is free has a context, which is charged before the answer. */
#define ATTACHED(on) (aim_share_of(on) != NULL && aim_attach(aim_share_of(on)) != NULL)

/* Opens a wrapper: `real` is the driver's function; calls that are not ours to judge go straight through. */
#define WRAP(symbol, parameters, arguments)                                                                            \
    AIM_EXPORT int symbol parameters;                                                                                  \
    AIM_EXPORT int symbol parameters                                                                                   \
    {                                                                                                                  \
        int(*const real) parameters = (int(*) parameters)aim_real(F_##symbol);                                         \
        if (real == NULL)                                                                                              \
            return aim_missing(F_##symbol, DRIVER.missing);                                                                                     \
        if (aim_depth > 0 || !aim_enabled())                                                                           \
            return aim_is_waiting() ? aim_too_early(DRIVER.missing) : real arguments;

#define END }

/* Begin, call where that says so, end: what each pair does is in charge.c. */
#define CALLED(type, begin, call, end)                                                                                 \
    ({                                                                                                                 \
        type about_;                                                                                                   \
        int code_ = DRIVER.out_of_memory;                                                                              \
        if (begin) {                                                                                                   \
            code_ = INSIDE(call);                                                                                      \
            code_ = end;                                                                                               \
        }                                                                                                              \
        code_;                                                                                                         \
    })
#define MADE(key) (code_ == 0 ? (key) : 0) /* read only after success */

#define CHARGED(kind, device, bytes, key, call)                                                                        \
    CALLED(struct aim_charge, aim_charge_begin(&about_, &DRIVER, (kind), (device), (bytes)), call,                     \
           aim_charge_end(&about_, code_, MADE(key)))
#define CREATED(handle, device, bytes, call)                                                                           \
    CALLED(struct aim_charge, aim_create_begin(&about_, &DRIVER, (device), (bytes)), call,                             \
           aim_create_end(&about_, code_, MADE(handle)))
#define FREED_AS(kind, key, stream, how, call)                                                                         \
    CALLED(struct aim_free, aim_free_begin(&about_, &DRIVER, (kind), (key), (stream)), call, aim_free_end(&about_, code_, how))
#define FREED(kind, key, call) FREED_AS(kind, key, NULL, AIM_AT_ONCE, call)
/* In the order of a stream: charged until the stream has come to it. */
#define FREED_LATER(key, stream, call) FREED_AS(K_LINEAR, key, stream, AIM_LATER, call)
#define FREED_POOLED(key, call) FREED_AS(K_POOLED, key, NULL, AIM_TO_POOL, call)

#define LAUNCH(stream, key, call)                                                                                      \
    ({                                                                                                                 \
        aim_gate_enter(&DRIVER, (stream), (key));                                                                      \
        int code_ = INSIDE(call);                                                                                      \
        aim_gate_leave();                                                                                              \
        code_;                                                                                                         \
    })

static inline struct aim_key kernel_key(const void *function, uint64_t x, uint64_t y, uint64_t z)
{
    uint64_t of_function = P(function) * 0x9e3779b97f4a7c15u;
    uint64_t exact = (of_function ^ (x << 40 ^ y << 20 ^ z)) * 0xbf58476d1ce4e5b9u;
    return (struct aim_key){.exact = exact | 1, .function = (of_function * 0x94d049bb133111ebu) << 1};
}
static inline struct aim_key graph_key(const void *graph)
{
    uint64_t exact = kernel_key(graph, 0, 0, 0).exact;
    return (struct aim_key){.exact = exact, .function = exact};
}
static inline struct aim_key size_key(unsigned function, uint64_t bytes)
{
    int shift = bytes < 16 ? 0 : 60 - __builtin_clzll(bytes);
    return kernel_key((const void *)(uintptr_t)(function + 1), bytes >> shift, (unsigned)shift, 0);
}

/* A successful synchronisation means that what was launched before it is finished. */
#define SYNCHRONISED(stream, extent, call)                                                                             \
    ({                                                                                                                 \
        uint64_t seen_ = aim_sync_enter(&DRIVER, 1);                                                                   \
        int code_ = INSIDE(call);                                                                                      \
        aim_sync_leave(&DRIVER, (stream), (extent), seen_, code_ == 0);                                                \
        code_;                                                                                                         \
    })

/* The same for what was launched before an event was recorded. */
#define EVENT_DONE(symbol, waits)                                                                                      \
    WRAP(symbol, (void *event), (event))                                                                               \
        aim_sync_enter(&DRIVER, waits);                                                                                \
        int code = INSIDE(real(event));                                                                                \
        aim_event_done(&DRIVER, event, waits, code == 0);                                                              \
        return code;                                                                                                   \
    END

/* The streams of a context take device memory. */
#define MADE_STREAM(context, stream, call)                                                                             \
    CALLED(struct aim_new_stream, aim_stream_make_begin(&about_, &DRIVER, (context)), call,                            \
           aim_stream_make_end(&about_, code_, MADE(P(*(stream)))))

/* Before a stream is destroyed or captured, our open batch on it is ended. */
#define STREAM_LEAVES(stream) (aim_inflight_stream_ends(&DRIVER, (stream)), aim_stream_destroyed(&DRIVER, (stream)))
#define STREAM_CAPTURED(stream, call)                                                                                  \
    ({                                                                                                                 \
        aim_inflight_stream_ends(&DRIVER, (stream));                                                                   \
        aim_capture_begins();                                                                                          \
        int code_ = INSIDE(call);                                                                                      \
        if (code_ != 0)                                                                                                \
            aim_capture_ends();                                                                                        \
        code_;                                                                                                         \
    })

/* Handles and mappings are recorded while the driver cannot give the same handle to another thread. */
#define WITH_HANDLES(call, then)                                                                                       \
    ({                                                                                                                 \
        aim_handles_begin();                                                                                           \
        int code_ = INSIDE(call);                                                                                      \
        if (code_ == 0)                                                                                                \
            then;                                                                                                      \
        aim_handles_end();                                                                                             \
        code_;                                                                                                         \
    })

#define PER_THREAD(stream) ((stream) == NULL ? (void *)2 : (stream))

/* Descriptors, as both interfaces lay them out. */
struct array_shape {
    size_t width, height;
    unsigned format, channels;
};
struct array3d_shape {
    size_t width, height, depth;
    unsigned format, channels, flags;
};
struct location {
    int first, second; /* of an allocation or a pool: type, and handle types */
    int type, id;
};
enum { ON_DEVICE = 1, MANAGED = 2, NODE_ALLOCATES = 10 };
int aim_pool_home(const struct location *where, int current); /* memory.c */
struct node_parameters {
    unsigned char pool[88];
    const void *access;
    size_t access_count;
    size_t bytes;
    uint64_t pointer;
};
struct any_node {
    int type, reserved[3];
    struct node_parameters memory;
};

uint64_t aim_array_bytes(size_t width, size_t height, size_t depth, uint64_t element);
uint64_t aim_mipmap_bytes(size_t width, size_t height, size_t depth, uint64_t element, unsigned levels);
uint64_t aim_format_bytes(unsigned format);
uint64_t aim_pitch_bytes(size_t width, size_t height);

/* Allocates from a pool, or, on a stream that is being captured, makes a node that will allocate. */
#define POOLED(pool, device, stream, pointer, bytes, call)                                                             \
    CALLED(struct aim_pooled, aim_pooled_begin(&about_, &DRIVER, (pool), (device), (stream), (bytes)), call,           \
           aim_pooled_end(&about_, code_, (pointer)))

/* The device that a stream-ordered allocation is made on: that of the stream. */
#define STREAM_DEVICE(stream) INSIDE(DRIVER.stream_device(stream))

#define LIMIT(limit, value, call)                                                                                      \
    CALLED(struct aim_entry, aim_limit_reserve(&DRIVER, DEVICE(), (limit), (value), &about_), call,                    \
           aim_limit_end(&about_, code_))

#define MEMORY_NODE(graph, parameters, call)                                                                           \
    CALLED(struct aim_charge, aim_node_begin(&about_, &DRIVER, P(graph), (parameters)), call,                          \
           aim_node_end(&about_, code_, P(graph)))

#define INSTANTIATED(graph, exec, call)                                                                                \
    ({                                                                                                                 \
        int code_ = INSIDE(call);                                                                                      \
        if (code_ == 0)                                                                                                \
            aim_graph_instantiated(P(graph), P(*(exec)));                                                              \
        code_;                                                                                                         \
    })

#endif
