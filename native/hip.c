/* HIP's runtime interface: memory. */
#define DRIVER aim_hip
#include "driver_calls.h"
#include "wrappers.h"

enum { MISSING = 801 }; /* hipErrorNotSupported */
#define HIP(name, parameters, arguments) CALL(AIM_HIP, name, parameters, arguments, MISSING)

static int device(void)
{
    int ordinal = 0;
    return HIP("hipGetDevice", (int *), (&ordinal)) == 0 ? ordinal : 0;
}

static uint64_t context(void) { return 0; } /* memory belongs to the device */

static int context_enter(uint64_t wanted) { return (void)wanted, 0; }
static void context_leave(void) {}

static int device_count(void)
{
    int count = 0;
    return HIP("hipGetDeviceCount", (int *), (&count)) == 0 ? count : 0;
}
static int device_uuid(int ordinal, unsigned char bytes[16])
{
    return HIP("hipDeviceGetUuid", (void *, int), (bytes, ordinal));
}

static int stream_device(void *stream)
{
    int ordinal = 0;
    if (P(stream) <= 2) /* default streams are those of the current device */
        return aim_current_device(&aim_hip);
    return HIP("hipStreamGetDevice", (void *, int *), (stream, &ordinal)) == 0 ? ordinal : device();
}
static int stream_is_blocking(void *stream)
{
    unsigned flags = 0;
    return HIP("hipStreamGetFlags", (void *, unsigned *), (stream, &flags)) != 0 || (flags & 1) == 0;
}

/* hipLimitPrintfFifoSize and hipLimitMallocHeapSize are bytes. Stacks are part of a queue's scratch memory, which the driver
 * takes when a kernel needs it: the daemon charges that when the driver reports it. */
static int limit_unit(int ordinal, int limit, uint64_t *bytes, uint64_t *included)
{
    return (void)ordinal, *bytes = 1, *included = 8u << 20, limit == 1 || limit == 2;
}

static int capturing(void *stream, uint64_t *graph)
{
    int status = 0;
    uint64_t id = 0;
    void *made = NULL;
    int code = HIP("hipStreamGetCaptureInfo_v2", (void *, int *, uint64_t *, void **, void **, size_t *),
                   (stream, &status, &id, &made, NULL, NULL));
    if (code == MISSING)
        return 0;
    *graph = P(made);
    return code != 0 || status != 0;
}

static int relax(int mode)
{
    return HIP("hipThreadExchangeStreamCaptureMode", (int *), (&mode)) == 0 ? mode : 0;
}

static int event_create(void **event) { return HIP("hipEventCreateWithFlags", (void **, unsigned), (event, 0)); }
static int event_destroy(void *event) { return HIP("hipEventDestroy", (void *), (event)); }
static int event_record(void *event, void *stream) { return HIP("hipEventRecord", (void *, void *), (event, stream)); }
static int event_query(void *event) { return HIP("hipEventQuery", (void *), (event)); }
static int event_elapsed(float *milliseconds, void *from, void *to)
{
    return HIP("hipEventElapsedTime", (float *, void *, void *), (milliseconds, from, to));
}
static int pool_attribute(void *pool, int attribute, uint64_t *value)
{
    return HIP("hipMemPoolGetAttribute", (void *, int, void *), (pool, attribute, value));
}
static int pool_trim(void *pool, size_t keep) { return HIP("hipMemPoolTrimTo", (void *, size_t), (pool, keep)); }
static void *device_pool(int ordinal)
{
    void *pool = NULL;
    return HIP("hipDeviceGetMemPool", (void **, int), (&pool, ordinal)) == 0 ? pool : NULL;
}
static int graph_reserved(int ordinal, uint64_t *value)
{
    return HIP("hipDeviceGetGraphMemAttribute", (int, int, void *), (ordinal, 2, value));
}
static int graph_trim(int ordinal) { return HIP("hipDeviceGraphMemTrim", (int), (ordinal)); }
static int free_in_order(uint64_t pointer, void *stream)
{
    return HIP("hipFreeAsync", (void *, void *), ((void *)(uintptr_t)pointer, stream));
}

const struct aim_driver aim_hip = {
    .api = AIM_HIP,
    .out_of_memory = 2,
    .missing = MISSING,
    .rounding = 4096,
    .pool_grain = 2u << 20,
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

WRAP(hipMalloc, (void **pointer, size_t bytes), (pointer, bytes))
    return CHARGED(K_LINEAR, DEVICE(), bytes, P(*pointer), real(pointer, bytes));
END
WRAP(hipExtMallocWithFlags, (void **pointer, size_t bytes, unsigned flags), (pointer, bytes, flags))
    return CHARGED(K_LINEAR, DEVICE(), bytes, P(*pointer), real(pointer, bytes, flags));
END
WRAP(hipMallocManaged, (void **pointer, size_t bytes, unsigned flags), (pointer, bytes, flags))
    return CHARGED(K_LINEAR, DEVICE(), bytes, P(*pointer), real(pointer, bytes, flags));
END
WRAP(hipMallocPitch, (void **pointer, size_t *pitch, size_t width, size_t height), (pointer, pitch, width, height))
    return CHARGED(K_LINEAR, DEVICE(), aim_pitch_bytes(width, height), P(*pointer), real(pointer, pitch, width, height));
END
WRAP(hipMemAllocPitch, (void **pointer, size_t *pitch, size_t width, size_t height, unsigned element),
     (pointer, pitch, width, height, element))
    return CHARGED(K_LINEAR, DEVICE(), aim_pitch_bytes(width, height), P(*pointer),
                   real(pointer, pitch, width, height, element));
END

struct pitched {
    void *pointer;
    size_t pitch, width, height;
};
struct extent {
    size_t width, height, depth;
};
struct channels {
    int x, y, z, w, kind;
};
static uint64_t channel_bytes(const struct channels *c)
{
    uint64_t bits = (uint64_t)(unsigned)c->x + (unsigned)c->y + (unsigned)c->z + (unsigned)c->w;
    return (bits + 7) / 8;
}
WRAP(hipMalloc3D, (struct pitched * memory, struct extent extent), (memory, extent))
    return CHARGED(K_LINEAR, DEVICE(),
                   aim_array_bytes(aim_pitch_bytes(extent.width, 1), extent.height, extent.depth, 1),
                   P(memory->pointer), real(memory, extent));
END
WRAP(hipMallocArray, (void **array, const struct channels *channels, size_t width, size_t height, unsigned flags),
     (array, channels, width, height, flags))
    if (channels == NULL)
        return INSIDE(real(array, channels, width, height, flags));
    return CHARGED(K_ARRAY, DEVICE(), aim_array_bytes(width, height, 1, channel_bytes(channels)), P(*array),
                   real(array, channels, width, height, flags));
END
WRAP(hipMalloc3DArray, (void **array, const struct channels *channels, struct extent extent, unsigned flags),
     (array, channels, extent, flags))
    if (channels == NULL)
        return INSIDE(real(array, channels, extent, flags));
    return CHARGED(K_ARRAY, DEVICE(), aim_array_bytes(extent.width, extent.height, extent.depth, channel_bytes(channels)),
                   P(*array), real(array, channels, extent, flags));
END
#define ELEMENT(shape) (aim_format_bytes((shape)->format) * (shape)->channels)
WRAP(hipArrayCreate, (void **array, const struct array_shape *shape), (array, shape))
    if (shape == NULL)
        return INSIDE(real(array, shape));
    return CHARGED(K_ARRAY, DEVICE(), aim_array_bytes(shape->width, shape->height, 1, ELEMENT(shape)), P(*array),
                   real(array, shape));
END
WRAP(hipArray3DCreate, (void **array, const struct array3d_shape *shape), (array, shape))
    if (shape == NULL)
        return INSIDE(real(array, shape));
    return CHARGED(K_ARRAY, DEVICE(), aim_array_bytes(shape->width, shape->height, shape->depth, ELEMENT(shape)),
                   P(*array), real(array, shape));
END
WRAP(hipMallocMipmappedArray,
     (void **array, const struct channels *channels, struct extent extent, unsigned levels, unsigned flags),
     (array, channels, extent, levels, flags))
    if (channels == NULL)
        return INSIDE(real(array, channels, extent, levels, flags));
    return CHARGED(K_ARRAY, DEVICE(),
                   aim_mipmap_bytes(extent.width, extent.height, extent.depth, channel_bytes(channels), levels),
                   P(*array), real(array, channels, extent, levels, flags));
END
WRAP(hipMipmappedArrayCreate, (void **array, const struct array3d_shape *shape, unsigned levels), (array, shape, levels))
    if (shape == NULL)
        return INSIDE(real(array, shape, levels));
    return CHARGED(K_ARRAY, DEVICE(),
                   aim_mipmap_bytes(shape->width, shape->height, shape->depth, ELEMENT(shape), levels), P(*array),
                   real(array, shape, levels));
END

WRAP(hipMallocAsync, (void **pointer, size_t bytes, void *stream), (pointer, bytes, stream))
    int on = STREAM_DEVICE(stream);
    return POOLED(INSIDE(device_pool(on)), on, stream, pointer, bytes, real(pointer, bytes, stream));
END
WRAP(hipMallocFromPoolAsync, (void **pointer, size_t bytes, void *pool, void *stream), (pointer, bytes, pool, stream))
    return POOLED(pool, aim_pool_device(&DRIVER, pool), stream, pointer, bytes, real(pointer, bytes, pool, stream));
END

WRAP(hipMemCreate, (void **handle, size_t bytes, const struct location *where, uint64_t flags),
     (handle, bytes, where, flags))
    if (where == NULL || where->type != ON_DEVICE)
        return real(handle, bytes, where, flags);
    return CREATED(P(*handle), where->id, bytes, real(handle, bytes, where, flags));
END

WRAP(hipMemMap, (void *address, size_t bytes, size_t offset, void *handle, uint64_t flags),
     (address, bytes, offset, handle, flags))
    return WITH_HANDLES(real(address, bytes, offset, handle, flags), aim_handle_mapped(P(handle), P(address), bytes));
END
WRAP(hipMemExportToShareableHandle, (void *shared, void *handle, int type, uint64_t flags), (shared, handle, type, flags))
    return WITH_HANDLES(real(shared, handle, type, flags), aim_handle_exported(P(handle)));
END
WRAP(hipMemUnmap, (void *address, size_t bytes), (address, bytes))
    return WITH_HANDLES(real(address, bytes), aim_handle_unmapped(P(address), bytes));
END
WRAP(hipMemRelease, (void *handle), (handle))
    return WITH_HANDLES(real(handle), aim_handle_released(P(handle)));
END
WRAP(hipMemRetainAllocationHandle, (void **handle, void *address), (handle, address))
    return WITH_HANDLES(real(handle, address), aim_handle_retained(P(*handle), P(address)));
END

struct sparse { /* hipArrayMapInfo */
    unsigned char subject[56];
    unsigned operation, handle_type;
    void *handle;
    unsigned char rest[24];
};
static void pin(const struct sparse *list, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        if (list[i].operation == 1) /* hipMemOperationTypeMap */
            aim_handle_pinned(P(list[i].handle));
}
WRAP(hipMemMapArrayAsync, (struct sparse * list, unsigned count, void *stream), (list, count, stream))
    return WITH_HANDLES(real(list, count, stream), pin(list, count));
END

static int is_pooled(void *pointer)
{
    struct aim_entry held;
    return aim_allocation_get(K_POOLED, P(pointer), &held);
}
WRAP(hipFree, (void *pointer), (pointer))
    if (is_pooled(pointer))
        return FREED_POOLED(P(pointer), real(pointer));
    return FREED(K_LINEAR, P(pointer), real(pointer));
END
WRAP(hipFreeAsync, (void *pointer, void *stream), (pointer, stream))
    uint64_t graph = 0;
    if (INSIDE(capturing(stream, &graph))) {
        int code = INSIDE(real(pointer, stream));
        if (code == 0)
            aim_capture_freed(graph, stream, P(pointer));
        return code;
    }
    if (is_pooled(pointer))
        return FREED_POOLED(P(pointer), real(pointer, stream));
    return FREED_LATER(P(pointer), stream, real(pointer, stream));
END
#define ARRAY_FREE(symbol)                                                                                             \
    WRAP(symbol, (void *array), (array))                                                                               \
        return FREED(K_ARRAY, P(array), real(array));                                                                  \
    END
ARRAY_FREE(hipFreeArray)
ARRAY_FREE(hipArrayDestroy)
ARRAY_FREE(hipFreeMipmappedArray)
ARRAY_FREE(hipMipmappedArrayDestroy)

WRAP(hipMemPoolCreate, (void **pool, const struct location *where), (pool, where))
    int code = INSIDE(real(pool, where));
    if (code == 0)
        aim_pool_made(&DRIVER, *pool, aim_pool_home(where, DEVICE()));
    return code;
END
WRAP(hipMemPoolDestroy, (void *pool), (pool))
    uint64_t identity = aim_pool_gone(&DRIVER, P(pool)); /* before the driver can give the handle to another thread */
    int code = INSIDE(real(pool));
    if (code != 0)
        aim_pool_kept(P(pool), identity);
    return code;
END
WRAP(hipMemPoolTrimTo, (void *pool, size_t keep), (pool, keep))
    int code = INSIDE(real(pool, keep));
    aim_pools_refresh(&DRIVER, aim_pool_device(&DRIVER, pool));
    return code;
END
WRAP(hipDeviceReset, (void), ())
    int on = DEVICE();
    aim_inflight_context_ends(0); /* HIP's events belong to the device */
    int code = INSIDE(real());
    if (code == 0)
        aim_forget_device(&DRIVER, on);
    return code;
END
WRAP(hipDevicePrimaryCtxReset, (int on), (on))
    aim_inflight_context_ends(0);
    int code = INSIDE(real(on));
    if (code == 0)
        aim_forget_device(&DRIVER, on);
    return code;
END
WRAP(hipDeviceSetLimit, (int limit, size_t value), (limit, value))
    return LIMIT(limit, value, real(limit, value));
END

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }
WRAP(hipMemGetInfo, (size_t * free_bytes, size_t *total_bytes), (free_bytes, total_bytes))
    int code = INSIDE(real(free_bytes, total_bytes));
    uint64_t cap, used;
    int on = DEVICE();
    if (code == 0 && ATTACHED(on) && aim_cap(on, &cap, &used)) {
        if (free_bytes != NULL)
            *free_bytes = least(*free_bytes, cap > used ? cap - used : 0);
        if (total_bytes != NULL)
            *total_bytes = least(*total_bytes, cap);
    }
    return code;
END
WRAP(hipDeviceTotalMem, (size_t * bytes, int on), (bytes, on))
    int code = INSIDE(real(bytes, on));
    uint64_t cap, used;
    if (code == 0 && aim_cap(on, &cap, &used))
        *bytes = least(*bytes, cap);
    return code;
END
/* Where totalGlobalMem lies: behind the name, and since ROCm 6 behind the UUID and LUID too. */
#define PROPERTIES(symbol, offset)                                                                                     \
    WRAP(symbol, (void *properties, int on), (properties, on))                                                         \
        int code = INSIDE(real(properties, on));                                                                       \
        uint64_t cap, used;                                                                                            \
        size_t *bytes = (size_t *)(void *)((char *)properties + (offset));                                             \
        if (code == 0 && aim_cap(on, &cap, &used))                                                                     \
            *bytes = least(*bytes, cap);                                                                               \
        return code;                                                                                                   \
    END
PROPERTIES(hipGetDeviceProperties, 256)
PROPERTIES(hipGetDevicePropertiesR0000, 256)
PROPERTIES(hipGetDevicePropertiesR0600, 288)
