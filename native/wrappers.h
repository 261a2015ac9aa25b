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
            return real arguments;

#define END }

/* Charge, call, and give back on failure. */
#define CHARGED(kind, device_, bytes_, key, call)                                                                      \
    ({                                                                                                                 \
        int on_ = (device_), code_ = DRIVER.out_of_memory;                                                             \
        uint64_t size_ = (bytes_), charge_ = aim_charge_of(&DRIVER, (kind), on_, size_);                               \
        aim_driver_count(&DRIVER, on_, charge_);                                                                       \
        aim_call_begins();                                                                                             \
        if (aim_reserve_hard(&DRIVER, on_, charge_)) {                                                                 \
            code_ = INSIDE(call);                                                                                      \
            if (code_ != 0)                                                                                            \
                aim_give_back(on_, charge_);                                                                           \
            else                                                                                                       \
                aim_track(&DRIVER, (kind), (key), on_, size_, charge_);                                                \
        }                                                                                                              \
        aim_call_ends();                                                                                               \
        code_;                                                                                                         \
    })

/* Taken out before the driver frees it: another thread may get the same address at once. */
#define FREED_AS(kind, key, call, then)                                                                                \
    ({                                                                                                                 \
        struct aim_entry held_;                                                                                        \
        aim_call_begins();                                                                                             \
        int known_ = aim_allocation_take((kind), (key), &held_);                                                       \
        int code_ = INSIDE(call);                                                                                      \
        if (known_ && code_ != 0)                                                                                      \
            aim_allocation_put(&held_);                                                                                \
        else if (known_)                                                                                               \
            then;                                                                                                      \
        aim_call_ends();                                                                                               \
        code_;                                                                                                         \
    })
#define FREED(kind, key, call) FREED_AS(kind, key, call, aim_untrack(&held_))
#define FREED_POOLED(key, call) FREED_AS(K_POOLED, key, call, aim_pool_freed(&DRIVER, &held_))

#define LAUNCH(stream, key, call)                                                                                      \
    ({                                                                                                                 \
        aim_gate_enter(&DRIVER, (stream), (key));                                                                      \
        int code_ = INSIDE(call);                                                                                      \
        aim_gate_leave();                                                                                              \
        code_;                                                                                                         \
    })

/* Identifies launches that take about equally long: a kernel with its grid, a graph, a copy of about this size. */
static inline uint64_t kernel_key(const void *function, uint64_t x, uint64_t y, uint64_t z)
{
    return (P(function) * 0x9e3779b97f4a7c15u ^ (x << 40 | y << 20 | z)) * 0xbf58476d1ce4e5b9u | 1;
}
static inline uint64_t size_key(unsigned function, uint64_t bytes)
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
#define MADE_STREAM(context_, stream, call)                                                                            \
    ({                                                                                                                 \
        uint64_t in_ = (context_);                                                                                     \
        int entered_ = INSIDE(DRIVER.context_enter(in_)), on_ = DEVICE(), code_ = DRIVER.out_of_memory;                \
        aim_driver_count(&DRIVER, on_, DRIVER.stream_bytes);                                                           \
        aim_call_begins();                                                                                             \
        if (aim_stream_begin(&DRIVER, on_, in_)) {                                                                     \
            code_ = INSIDE(call);                                                                                      \
            aim_stream_end(&DRIVER, on_, in_, code_ == 0 ? P(*(stream)) : 0);                                          \
        }                                                                                                              \
        aim_call_ends();                                                                                               \
        if (entered_)                                                                                                  \
            INSIDE((DRIVER.context_leave(), 0));                                                                       \
        code_;                                                                                                         \
    })

/* Before a stream is destroyed or captured, our open batch on it is ended. */
#define STREAM_LEAVES(stream) (aim_inflight_stream_ends(&DRIVER, (stream)), aim_stream_destroyed(&DRIVER, (stream)))
#define STREAM_CAPTURED(stream, call)                                                                                  \
    ({                                                                                                                 \
        aim_inflight_stream_ends(&DRIVER, (stream));                                                                   \
        INSIDE(call);                                                                                                  \
    })

/* Handles and mappings are recorded while the driver cannot give the same handle to another thread. */
#define WITH_HANDLES(call, then)                                                                                       \
    ({                                                                                                                 \
        aim_call_begins();                                                                                             \
        aim_handles_lock();                                                                                            \
        int code_ = INSIDE(call);                                                                                      \
        if (code_ == 0)                                                                                                \
            then;                                                                                                      \
        aim_handles_unlock();                                                                                          \
        aim_call_ends();                                                                                               \
        code_;                                                                                                         \
    })

/* Memory with a handle: charged, then made. */
#define CREATED(handle, device_, bytes_, call)                                                                         \
    ({                                                                                                                 \
        int on_ = (device_), code_ = DRIVER.out_of_memory;                                                             \
        aim_driver_count(&DRIVER, on_, (bytes_));                                                                      \
        aim_call_begins();                                                                                             \
        if (aim_reserve_hard(&DRIVER, on_, (bytes_))) {                                                                \
            aim_handles_lock();                                                                                        \
            code_ = INSIDE(call);                                                                                      \
            if (code_ == 0)                                                                                            \
                aim_handle_created((handle), on_, (bytes_));                                                           \
            aim_handles_unlock();                                                                                      \
            if (code_ != 0)                                                                                            \
                aim_give_back(on_, (bytes_));                                                                          \
        }                                                                                                              \
        aim_call_ends();                                                                                               \
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
    int first, second; /* type and handle types: not ours to read */
    int type, id;
};
enum { ON_DEVICE = 1, NODE_ALLOCATES = 10 };
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
#define POOLED(pool_, device_, stream, pointer, bytes_, call)                                                          \
    ({                                                                                                                 \
        int code_ = DRIVER.out_of_memory, on_ = (device_);                                                             \
        uint64_t graph_ = 0, size_ = aim_round(&DRIVER, on_, (bytes_));                                                \
        if (on_ < 0) { /* host memory */                                                                               \
            code_ = INSIDE(call);                                                                                      \
        } else if (INSIDE(DRIVER.capturing((stream), &graph_))) {                                                      \
            if (aim_capture_reserve(&DRIVER, graph_, (stream), on_, size_)) {                                          \
                code_ = INSIDE(call);                                                                                  \
                aim_capture_ended(&DRIVER, graph_, (stream), on_, size_, code_ == 0 ? P(*(pointer)) : 0);              \
            }                                                                                                          \
        } else {                                                                                                       \
            aim_driver_count(&DRIVER, on_, size_);                                                                     \
            aim_call_begins();                                                                                         \
            int begun_ = aim_pool_begin(on_, &DRIVER, (pool_), size_);                                                 \
            code_ = begun_ ? INSIDE(call) : code_;                                                                     \
            if (begun_ && !aim_pool_end(&DRIVER, (pool_), size_, code_ == 0 ? P(*(pointer)) : 0) && code_ == 0) {      \
                UNDO_POOLED(*(pointer), (stream));                                                                     \
                *(pointer) = 0;                                                                                        \
                code_ = DRIVER.out_of_memory;                                                                          \
            }                                                                                                          \
            aim_call_ends();                                                                                           \
        }                                                                                                              \
        code_;                                                                                                         \
    })

/* The device that a stream-ordered allocation is made on: that of the stream. */
#define STREAM_DEVICE(stream) INSIDE(DRIVER.stream_device(stream))

#define LIMIT(limit, value, call)                                                                                      \
    ({                                                                                                                 \
        struct aim_entry before_;                                                                                      \
        int code_ = DRIVER.out_of_memory;                                                                              \
        if (aim_limit_reserve(&DRIVER, DEVICE(), (limit), (value), &before_)) {                                        \
            code_ = INSIDE(call);                                                                                      \
            if (code_ != 0)                                                                                            \
                aim_limit_undo(&before_);                                                                              \
        }                                                                                                              \
        code_;                                                                                                         \
    })

#define MEMORY_NODE(graph_, parameters, call)                                                                          \
    ({                                                                                                                 \
        const struct location *where_ = (const struct location *)(const void *)(parameters)->pool;                     \
        int code_ = DRIVER.out_of_memory, on_ = where_->id;                                                            \
        uint64_t size_ = aim_round(&DRIVER, on_, (parameters)->bytes);                                                 \
        if (where_->type != ON_DEVICE)                                                                                 \
            code_ = INSIDE(call);                                                                                      \
        else if (aim_graph_reserve(&DRIVER, P(graph_), on_, size_)) {                                                  \
            code_ = INSIDE(call);                                                                                      \
            if (code_ != 0)                                                                                            \
                aim_graph_unreserve(&DRIVER, P(graph_), on_, size_);                                                   \
        }                                                                                                              \
        code_;                                                                                                         \
    })

#define INSTANTIATED(graph_, exec, call)                                                                               \
    ({                                                                                                                 \
        int code_ = INSIDE(call);                                                                                      \
        if (code_ == 0)                                                                                                \
            aim_graph_instantiated(P(graph_), P(*(exec)));                                                             \
        code_;                                                                                                         \
    })

#endif
