/* CUDA's driver interface: contexts and memory. */
#define DRIVER aim_cuda
#include "driver_calls.h"
#include "wrappers.h"

enum { MISSING = 500 }; /* CUDA_ERROR_NOT_FOUND */
#define CUDA(name, parameters, arguments) CALL(AIM_CUDA, name, parameters, arguments, MISSING)

static int device(void)
{
    int ordinal = 0;
    return CUDA("cuCtxGetDevice", (int *), (&ordinal)) == 0 ? ordinal : 0;
}

static uint64_t context(void)
{
    void *current = NULL;
    return CUDA("cuCtxGetCurrent", (void **), (&current)) == 0 ? P(current) : 0;
}

static int context_enter(uint64_t wanted)
{
    return wanted != 0 && wanted != context() && CUDA("cuCtxPushCurrent_v2", (void *), ((void *)(uintptr_t)wanted)) == 0;
}
static void context_leave(void)
{
    void *popped = NULL;
    (void)CUDA("cuCtxPopCurrent_v2", (void **), (&popped));
}

static int device_count(void)
{
    int count = 0;
    return CUDA("cuDeviceGetCount", (int *), (&count)) == 0 ? count : 0;
}
static int device_uuid(int ordinal, unsigned char bytes[16])
{
    int code = CUDA("cuDeviceGetUuid_v2", (void *, int), (bytes, ordinal)); /* of the MIG instance, where there is one */
    return code != MISSING ? code : CUDA("cuDeviceGetUuid", (void *, int), (bytes, ordinal));
}

static int stream_device(void *stream)
{
    int ordinal = 0;
    void *owner = NULL;
    if (P(stream) <= 2) /* default streams are those of the current context */
        return aim_current_device(&aim_cuda);
    if (CUDA("cuStreamGetDevice", (void *, int *), (stream, &ordinal)) == 0)
        return ordinal;
    if (CUDA("cuStreamGetCtx", (void *, void **), (stream, &owner)) != 0)
        return device();
    int entered = context_enter(P(owner));
    ordinal = device();
    if (entered)
        context_leave();
    return ordinal;
}
static int stream_is_blocking(void *stream)
{
    unsigned flags = 0;
    return CUDA("cuStreamGetFlags", (void *, unsigned *), (stream, &flags)) != 0 || (flags & 1) == 0;
}

/* Stacks, and the state of parent grids that wait for child grids (registers, 1 KiB per thread), are kept for all threads that
 * can be resident. A launch that device code has pending takes its parameters (4 KiB) and as much again at most. */
static int limit_unit(int ordinal, int limit, uint64_t *bytes, uint64_t *included)
{
    int processors = 0, threads = 0;
    switch (limit) {
    case 1: /* CU_LIMIT_PRINTF_FIFO_SIZE */
    case 2: /* CU_LIMIT_MALLOC_HEAP_SIZE */
        return *bytes = 1, *included = 8u << 20, 1;
    case 4: /* CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT */
        return *bytes = 8192, *included = 2048, 1;
    case 0: /* CU_LIMIT_STACK_SIZE */
    case 3: /* CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH */
        break;
    default:
        return 0;
    }
    if (CUDA("cuDeviceGetAttribute", (int *, int, int), (&processors, 16, ordinal)) != 0 ||
        CUDA("cuDeviceGetAttribute", (int *, int, int), (&threads, 39, ordinal)) != 0)
        return 0;
    *bytes = (uint64_t)(unsigned)processors * (unsigned)threads * (limit == 0 ? 1 : 1024);
    *included = limit == 0 ? 1024 : 2;
    return 1;
}

/* A stream that cannot be asked (a legacy stream beside a capture) must not be touched either. */
static int capturing(void *stream, uint64_t *graph)
{
    int status = 0;
    uint64_t id = 0;
    void *made = NULL;
    int code = CUDA("cuStreamGetCaptureInfo_v2", (void *, int *, uint64_t *, void **, void **, size_t *),
                    (stream, &status, &id, &made, NULL, NULL));
    if (code == MISSING)
        return 0;
    *graph = P(made);
    return code != 0 || status != 0;
}

static int relax(int mode)
{
    return CUDA("cuThreadExchangeStreamCaptureMode", (int *), (&mode)) == 0 ? mode : 0;
}

static int event_create(void **event) { return CUDA("cuEventCreate", (void **, unsigned), (event, 0)); }
static int event_destroy(void *event) { return CUDA("cuEventDestroy_v2", (void *), (event)); }
static int event_record(void *event, void *stream) { return CUDA("cuEventRecord", (void *, void *), (event, stream)); }
static int event_query(void *event) { return CUDA("cuEventQuery", (void *), (event)); }
static int event_elapsed(float *milliseconds, void *from, void *to)
{
    return CUDA("cuEventElapsedTime", (float *, void *, void *), (milliseconds, from, to));
}
static int pool_attribute(void *pool, int attribute, uint64_t *value)
{
    return CUDA("cuMemPoolGetAttribute", (void *, int, void *), (pool, attribute, value));
}
static int pool_trim(void *pool, size_t keep) { return CUDA("cuMemPoolTrimTo", (void *, size_t), (pool, keep)); }
static void *device_pool(int ordinal)
{
    void *pool = NULL;
    return CUDA("cuDeviceGetMemPool", (void **, int), (&pool, ordinal)) == 0 ? pool : NULL;
}
static int graph_reserved(int ordinal, uint64_t *value)
{
    return CUDA("cuDeviceGetGraphMemAttribute", (int, int, void *), (ordinal, 2, value));
}
static int graph_trim(int ordinal) { return CUDA("cuDeviceGraphMemTrim", (int), (ordinal)); }
static int free_in_order(uint64_t pointer, void *stream) { return CUDA("cuMemFreeAsync", (uint64_t, void *), (pointer, stream)); }

const struct aim_driver aim_cuda = {
    .api = AIM_CUDA,
    .out_of_memory = 2,
    .missing = MISSING,
    .rounding = 2u << 20,
    .block_bytes = 2u << 20,
    .pool_grain = 32u << 20,
    .stream_bytes = 1u << 20, /* 0.6 MiB were measured on an H200 with 300 streams */
    .device = device,
    .context = context,
    .context_enter = context_enter,
    .context_leave = context_leave,
    .device_count = device_count,
    .device_uuid = device_uuid,
    .stream_device = stream_device,
    .stream_is_blocking = stream_is_blocking,
    .limit_unit = limit_unit,
    .capturing = capturing,
    .relax = relax,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_query = event_query,
    .event_elapsed = event_elapsed,
    .pool_attribute = pool_attribute,
    .pool_trim = pool_trim,
    .device_pool = device_pool,
    .graph_reserved = graph_reserved,
    .graph_trim = graph_trim,
    .free_in_order = free_in_order,
};

/* Symbols without a suffix are those of CUDA 3.1: 32-bit addresses and sizes. */
WRAP(cuMemAlloc, (uint32_t *pointer, unsigned bytes), (pointer, bytes))
    return CHARGED(K_LINEAR, DEVICE(), bytes, *pointer, real(pointer, bytes));
END
WRAP(cuMemAlloc_v2, (uint64_t *pointer, size_t bytes), (pointer, bytes))
    return CHARGED(K_LINEAR, DEVICE(), bytes, *pointer, real(pointer, bytes));
END
WRAP(cuMemAllocManaged, (uint64_t *pointer, size_t bytes, unsigned flags), (pointer, bytes, flags))
    return CHARGED(K_LINEAR, DEVICE(), bytes, *pointer, real(pointer, bytes, flags));
END
WRAP(cuMemAllocPitch, (uint32_t *pointer, unsigned *pitch, unsigned width, unsigned height, unsigned element),
     (pointer, pitch, width, height, element))
    return CHARGED(K_LINEAR, DEVICE(), aim_pitch_bytes(width, height), *pointer,
                   real(pointer, pitch, width, height, element));
END
WRAP(cuMemAllocPitch_v2, (uint64_t *pointer, size_t *pitch, size_t width, size_t height, unsigned element),
     (pointer, pitch, width, height, element))
    return CHARGED(K_LINEAR, DEVICE(), aim_pitch_bytes(width, height), *pointer,
                   real(pointer, pitch, width, height, element));
END

#define ASYNC(symbol, form)                                                                                            \
    WRAP(symbol, (uint64_t * pointer, size_t bytes, void *stream), (pointer, bytes, stream))                           \
        int on = STREAM_DEVICE(form(stream));                                                                          \
        return POOLED(INSIDE(device_pool(on)), on, form(stream), pointer, bytes, real(pointer, bytes, stream));        \
    END
#define FROM_POOL(symbol, form)                                                                                        \
    WRAP(symbol, (uint64_t * pointer, size_t bytes, void *pool, void *stream), (pointer, bytes, pool, stream))         \
        return POOLED(pool, aim_pool_device(&DRIVER, pool), form(stream), pointer, bytes,                              \
                      real(pointer, bytes, pool, stream));                                                             \
    END
ASYNC(cuMemAllocAsync, )
ASYNC(cuMemAllocAsync_ptsz, PER_THREAD)
FROM_POOL(cuMemAllocFromPoolAsync, )
FROM_POOL(cuMemAllocFromPoolAsync_ptsz, PER_THREAD)

struct old_shape {
    unsigned width, height, format, channels;
};
struct old_shape3d {
    unsigned width, height, depth, format, channels, flags;
};
#define ELEMENT(shape) (aim_format_bytes((shape)->format) * (shape)->channels)
WRAP(cuArrayCreate, (void **array, const struct old_shape *shape), (array, shape))
    if (shape == NULL)
        return INSIDE(real(array, shape));
    return CHARGED(K_ARRAY, DEVICE(), aim_array_bytes(shape->width, shape->height, 1, ELEMENT(shape)), P(*array),
                   real(array, shape));
END
WRAP(cuArrayCreate_v2, (void **array, const struct array_shape *shape), (array, shape))
    if (shape == NULL)
        return INSIDE(real(array, shape));
    return CHARGED(K_ARRAY, DEVICE(), aim_array_bytes(shape->width, shape->height, 1, ELEMENT(shape)), P(*array),
                   real(array, shape));
END
WRAP(cuArray3DCreate, (void **array, const struct old_shape3d *shape), (array, shape))
    if (shape == NULL)
        return INSIDE(real(array, shape));
    return CHARGED(K_ARRAY, DEVICE(), aim_array_bytes(shape->width, shape->height, shape->depth, ELEMENT(shape)),
                   P(*array), real(array, shape));
END
WRAP(cuArray3DCreate_v2, (void **array, const struct array3d_shape *shape), (array, shape))
    if (shape == NULL)
        return INSIDE(real(array, shape));
    return CHARGED(K_ARRAY, DEVICE(), aim_array_bytes(shape->width, shape->height, shape->depth, ELEMENT(shape)),
                   P(*array), real(array, shape));
END
WRAP(cuMipmappedArrayCreate, (void **array, const struct array3d_shape *shape, unsigned levels), (array, shape, levels))
    if (shape == NULL)
        return INSIDE(real(array, shape, levels));
    return CHARGED(K_ARRAY, DEVICE(),
                   aim_mipmap_bytes(shape->width, shape->height, shape->depth, ELEMENT(shape), levels), P(*array),
                   real(array, shape, levels));
END

WRAP(cuMemCreate, (uint64_t *handle, size_t bytes, const struct location *where, uint64_t flags),
     (handle, bytes, where, flags))
    if (where == NULL || where->type != ON_DEVICE)
        return real(handle, bytes, where, flags);
    return CREATED(*handle, where->id, bytes, real(handle, bytes, where, flags));
END

WRAP(cuMemMap, (uint64_t address, size_t bytes, size_t offset, uint64_t handle, uint64_t flags),
     (address, bytes, offset, handle, flags))
    return WITH_HANDLES(real(address, bytes, offset, handle, flags), aim_handle_mapped(handle, address, bytes));
END
WRAP(cuMemExportToShareableHandle, (void *shared, uint64_t handle, int type, uint64_t flags), (shared, handle, type, flags))
    return WITH_HANDLES(real(shared, handle, type, flags), aim_handle_exported(handle));
END
WRAP(cuMemUnmap, (uint64_t address, size_t bytes), (address, bytes))
    return WITH_HANDLES(real(address, bytes), aim_handle_unmapped(address, bytes));
END
WRAP(cuMemRelease, (uint64_t handle), (handle))
    return WITH_HANDLES(real(handle), aim_handle_released(handle));
END
WRAP(cuMemRetainAllocationHandle, (uint64_t * handle, void *address), (handle, address))
    return WITH_HANDLES(real(handle, address), aim_handle_retained(*handle, P(address)));
END

struct sparse { /* CUarrayMapInfo */
    unsigned char subject[56];
    unsigned operation, handle_type;
    uint64_t handle;
    unsigned char rest[24];
};
static void pin(const struct sparse *list, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        if (list[i].operation == 1) /* CU_MEM_OPERATION_TYPE_MAP */
            aim_handle_pinned(list[i].handle);
}
#define MAP_ARRAY(symbol)                                                                                              \
    WRAP(symbol, (struct sparse * list, unsigned count, void *stream), (list, count, stream))                          \
        return WITH_HANDLES(real(list, count, stream), pin(list, count));                                              \
    END
MAP_ARRAY(cuMemMapArrayAsync)
MAP_ARRAY(cuMemMapArrayAsync_ptsz)

static int is_pooled(uint64_t pointer)
{
    struct aim_entry held;
    return aim_allocation_get(K_POOLED, pointer, &held);
}
WRAP(cuMemFree, (uint32_t pointer), (pointer))
    return FREED(K_LINEAR, pointer, real(pointer));
END
WRAP(cuMemFree_v2, (uint64_t pointer), (pointer))
    if (is_pooled(pointer))
        return FREED_POOLED(pointer, real(pointer));
    return FREED(K_LINEAR, pointer, real(pointer));
END
#define FREE_ASYNC(symbol, form)                                                                                       \
    WRAP(symbol, (uint64_t pointer, void *stream), (pointer, stream))                                                  \
        uint64_t graph = 0;                                                                                            \
        if (INSIDE(capturing(form(stream), &graph))) {                                                                 \
            int code = INSIDE(real(pointer, stream));                                                                  \
            if (code == 0)                                                                                             \
                aim_capture_freed(graph, form(stream), pointer);                                                       \
            return code;                                                                                               \
        }                                                                                                              \
        if (is_pooled(pointer))                                                                                        \
            return FREED_POOLED(pointer, real(pointer, stream));                                                       \
        return FREED_LATER(pointer, form(stream), real(pointer, stream));                                              \
    END
FREE_ASYNC(cuMemFreeAsync, )
FREE_ASYNC(cuMemFreeAsync_ptsz, PER_THREAD)
WRAP(cuArrayDestroy, (void *array), (array))
    return FREED(K_ARRAY, P(array), real(array));
END
WRAP(cuMipmappedArrayDestroy, (void *array), (array))
    return FREED(K_ARRAY, P(array), real(array));
END

WRAP(cuMemPoolCreate, (void **pool, const struct location *where), (pool, where))
    int code = INSIDE(real(pool, where));
    if (code == 0)
        aim_pool_made(&DRIVER, *pool, aim_pool_home(where, DEVICE()));
    return code;
END
WRAP(cuMemPoolDestroy, (void *pool), (pool))
    uint64_t identity = aim_pool_gone(&DRIVER, P(pool)); /* before the driver can give the handle to another thread */
    int code = INSIDE(real(pool));
    if (code != 0)
        aim_pool_kept(P(pool), identity);
    return code;
END
WRAP(cuMemPoolTrimTo, (void *pool, size_t keep), (pool, keep))
    int code = INSIDE(real(pool, keep));
    aim_pools_refresh(&DRIVER, aim_pool_device(&DRIVER, pool));
    return code;
END

#define OF_CONTEXT (1u << K_LINEAR | 1u << K_BLOCK | 1u << K_ARRAY | 1u << K_LIMIT | 1u << K_STREAM | 1u << K_STREAMS)
/* Taken out before the driver ends the context, since its addresses may be given out again at once; given back afterwards, or
 * put back where the driver refused: a primary context is released, not destroyed. */
static struct aim_taken *take_out(uint64_t which) { return which == 0 ? NULL : aim_allocations_take_out(which, OF_CONTEXT); }
static void context_ended(uint64_t which, struct aim_taken *taken)
{
    aim_taken_give_back(taken);
    aim_late_context_ended(which);
    aim_context_gone(which);
}
#define CONTEXT_DESTROY(symbol)                                                                                        \
    WRAP(symbol, (void *which), (which))                                                                               \
        aim_inflight_context_ends(P(which));                                                                           \
        struct aim_taken *taken = take_out(P(which));                                                                  \
        int code = INSIDE(real(which));                                                                                \
        if (code == 0)                                                                                                 \
            context_ended(P(which), taken);                                                                            \
        else                                                                                                           \
            aim_taken_put_back(taken);                                                                                 \
        return code;                                                                                                   \
    END
CONTEXT_DESTROY(cuCtxDestroy)
CONTEXT_DESTROY(cuCtxDestroy_v2)
WRAP(cuCtxSetLimit, (int limit, size_t value), (limit, value))
    return LIMIT(limit, value, real(limit, value));
END

#define MADE_CONTEXT(on, which, call)                                                                                  \
    ({                                                                                                                 \
        int code_ = DRIVER.out_of_memory;                                                                              \
        aim_driver_count(&DRIVER, (on), 0);                                                                            \
        if (aim_context_begin(&DRIVER, (on))) {                                                                        \
            code_ = (call);                                                                                            \
            aim_context_end((on), code_ == 0 ? P(*(which)) : 0);                                                       \
        }                                                                                                              \
        code_;                                                                                                         \
    })
#define CONTEXT(symbol, parameters, arguments)                                                                         \
    WRAP(symbol, parameters, arguments)                                                                                \
        return MADE_CONTEXT(on, which, INSIDE(real arguments));                                                        \
    END
CONTEXT(cuCtxCreate, (void **which, unsigned flags, int on), (which, flags, on))
CONTEXT(cuCtxCreate_v2, (void **which, unsigned flags, int on), (which, flags, on))
CONTEXT(cuCtxCreate_v3, (void **which, void *affinity, int count, unsigned flags, int on), (which, affinity, count, flags, on))
CONTEXT(cuCtxCreate_v4, (void **which, void *parameters, unsigned flags, int on), (which, parameters, flags, on))

/* A part of the primary context. */
WRAP(cuGreenCtxCreate, (void **which, void *resources, int on, unsigned flags), (which, resources, on, flags))
    return aim_admit_context(on) ? INSIDE(real(which, resources, on, flags)) : DRIVER.out_of_memory;
END
CONTEXT(cuGLCtxCreate, (void **which, unsigned flags, int on), (which, flags, on))
CONTEXT(cuGLCtxCreate_v2, (void **which, unsigned flags, int on), (which, flags, on))
CONTEXT(cuVDPAUCtxCreate, (void **which, unsigned flags, int on, uint32_t display, void *lookup), (which, flags, on, display, lookup))
CONTEXT(cuVDPAUCtxCreate_v2, (void **which, unsigned flags, int on, uint32_t display, void *lookup), (which, flags, on, display, lookup))

static uint64_t primary[AIM_DEVICES];
WRAP(cuDevicePrimaryCtxRetain, (void **which, int on), (which, on))
    int active = on >= 0 && on < AIM_DEVICES && aim_context_is_known(load(&primary[on]));
    int code = active ? INSIDE(real(which, on)) : MADE_CONTEXT(on, which, INSIDE(real(which, on)));
    if (code == 0 && on >= 0 && on < AIM_DEVICES)
        store(&primary[on], P(*which));
    return code;
END
static void primary_released(int on)
{
    unsigned flags = 0;
    int active = 1;
    CUDA("cuDevicePrimaryCtxGetState", (int, unsigned *, int *), (on, &flags, &active));
    if (!active && on >= 0 && on < AIM_DEVICES && load(&primary[on]) != 0) {
        struct aim_taken *taken = take_out(load(&primary[on]));
        aim_inflight_context_ends(load(&primary[on]));
        context_ended(load(&primary[on]), taken);
    }
}
#define PRIMARY_RELEASE(symbol)                                                                                        \
    WRAP(symbol, (int on), (on))                                                                                       \
        int code = INSIDE(real(on));                                                                                   \
        if (code == 0)                                                                                                 \
            INSIDE((primary_released(on), 0));                                                                         \
        return code;                                                                                                   \
    END
#define PRIMARY_RESET(symbol)                                                                                          \
    WRAP(symbol, (int on), (on))                                                                                       \
        uint64_t which = on >= 0 && on < AIM_DEVICES ? load(&primary[on]) : 0;                                         \
        if (which != 0)                                                                                                \
            aim_inflight_context_ends(which);                                                                          \
        struct aim_taken *taken = take_out(which);                                                                     \
        int code = INSIDE(real(on));                                                                                   \
        if (code == 0) { /* the context is made again when it is next used */                                          \
            aim_taken_give_back(taken);                                                                                \
            aim_late_context_ended(which);                                                                             \
        } else                                                                                                         \
            aim_taken_put_back(taken);                                                                                 \
        aim_pools_refresh(&DRIVER, on);                                                                                \
        return code;                                                                                                   \
    END
PRIMARY_RELEASE(cuDevicePrimaryCtxRelease)
PRIMARY_RELEASE(cuDevicePrimaryCtxRelease_v2)
PRIMARY_RESET(cuDevicePrimaryCtxReset)
PRIMARY_RESET(cuDevicePrimaryCtxReset_v2)

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }
#define INFO(symbol, type)                                                                                             \
    WRAP(symbol, (type * free_bytes, type * total_bytes), (free_bytes, total_bytes))                                   \
        int code = INSIDE(real(free_bytes, total_bytes));                                                              \
        uint64_t cap, used;                                                                                            \
        int on = DEVICE();                                                                                             \
        if (code == 0 && ATTACHED(on) && aim_cap(on, &cap, &used)) {                                                   \
            *free_bytes = (type)least(*free_bytes, cap > used ? cap - used : 0);                                       \
            *total_bytes = (type)least(*total_bytes, cap);                                                             \
        }                                                                                                              \
        return code;                                                                                                   \
    END
INFO(cuMemGetInfo, uint32_t)
INFO(cuMemGetInfo_v2, size_t)
#define TOTAL(symbol, type)                                                                                            \
    WRAP(symbol, (type * bytes, int on), (bytes, on))                                                                  \
        int code = INSIDE(real(bytes, on));                                                                            \
        uint64_t cap, used;                                                                                            \
        if (code == 0 && aim_cap(on, &cap, &used))                                                                     \
            *bytes = (type)least(*bytes, cap);                                                                         \
        return code;                                                                                                   \
    END
TOTAL(cuDeviceTotalMem, uint32_t)
TOTAL(cuDeviceTotalMem_v2, size_t)
