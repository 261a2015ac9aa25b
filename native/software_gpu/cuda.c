/* libcuda.so.1 and libnvidia-ml.so.1, as far as the interposer and its tests look at them. */
#include "gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define POOL(o) ((uint64_t)(o)-0x100)
#define POOL_HANDLE(i) ((void *)((i) + 0x100))

API int cuInit(unsigned flags) { return flags == 0 ? OK : INVALID; }
API int cuDeviceGetCount(int *count) { return *count = sd_devices(), OK; }
API int cuDeviceGetUuid_v2(unsigned char *uuid, int d) { return memset(uuid, 0xa0 + sd_physical(d), 16), OK; }
API int cuDeviceGetAttribute(int *value, int attribute, int d) { return (void)d, *value = attribute == 16 ? 100 : 1024, OK; }
API int cuDeviceGet(int *device, int ordinal) { return ordinal < sd_devices() ? (*device = ordinal, OK) : INVALID; }
API int cuDeviceGetName(char *name, int n, int d) { return (void)d, snprintf(name, (size_t)n, "software GPU"), OK; }
API int cuCtxGetDevice(int *device) { return *device = sd_device(), OK; }
API int cuCtxGetCurrent(void **which) { return *which = (void *)sd_context(), OK; }
API int cuCtxSetCurrent(void *which) { return sd_context_set((uint64_t)which); }
API int cuCtxPushCurrent_v2(void *which) { return sd_context_push((uint64_t)which); }
API int cuCtxPopCurrent_v2(void **which) { return *which = (void *)sd_context_pop(), OK; }
API int cuCtxSetLimit(int limit, size_t value) { return sd_limit(limit, value); }
API int cuStreamCreate(void **s, unsigned f) { return *s = sd_stream(f), *s == NULL ? OUT_OF_MEMORY : OK; }
API int cuStreamCreateWithPriority(void **s, unsigned f, int p) { return (void)p, cuStreamCreate(s, f); }
API int cuGreenCtxStreamCreate(void **s, void *g, unsigned f, int p) { return (void)g, (void)p, cuStreamCreate(s, f); }
API int cuCtxFromGreenCtx(void **c, void *g) { return *c = g, OK; }
API int cuStreamGetFlags(void *s, unsigned *f) { return sd_stream_flags(s, f); }
API int cuStreamGetCtx(void *s, void **c) { return *c = (void *)sd_stream_context(s), *c == NULL ? BAD_HANDLE : OK; }
API int cuStreamDestroy(void *s) { return sd_stream_destroy(s); }
API int cuStreamDestroy_v2(void *s) { return sd_stream_destroy(s); }
API int cuStreamWaitEvent(void *s, void *e, unsigned f) { return (void)f, sd_stream_wait(s, e); }
API int cuStreamWaitEvent_ptsz(void *s, void *e, unsigned f) { return (void)f, sd_stream_wait(s == NULL ? (void *)2 : s, e); }
API int cuModuleLoadData(void **m, const void *image) { return (void)image, *m = NULL, OK; }
API int cuModuleGetFunction(void **f, void *m, const char *name) { return (void)m, *f = sd_function(name), OK; }
API int cuModuleUnload(void *m) { return (void)m, OK; }
API int cuLibraryUnload(void *l) { return (void)l, OK; }
API int cuStreamGetCaptureInfo_v2(void *s, int *status, uint64_t *id, void **graph, void **d, size_t *n)
{
    (void)d, (void)n;
    uint64_t made = 0;
    *status = sd_capturing(s, &made);
    *id = 1;
    return *graph = (void *)made, OK;
}
#define THREAD_STREAM(s) ((s) == NULL ? (void *)2 : (s))
API int cuStreamBeginCapture(void *s) { return sd_capture_begin(s, sd_graph()); }
API int cuStreamBeginCapture_ptsz(void *s, int mode) { return (void)mode, sd_capture_begin(THREAD_STREAM(s), sd_graph()); }
API int cuStreamBeginCapture_v2(void *s, int mode) { return (void)mode, sd_capture_begin(s, sd_graph()); }
API int cuStreamBeginCapture_v2_ptsz(void *s, int mode) { return (void)mode, sd_capture_begin(THREAD_STREAM(s), sd_graph()); }
API int cuStreamBeginCaptureToGraph(void *s, void *g, void *d, void *e, size_t n, int mode)
{
    return (void)d, (void)e, (void)n, (void)mode, sd_capture_begin(s, (uint64_t)g);
}
API int cuStreamBeginCaptureToGraph_ptsz(void *s, void *g, void *d, void *e, size_t n, int mode)
{
    return cuStreamBeginCaptureToGraph(THREAD_STREAM(s), g, d, e, n, mode);
}
API int cuStreamEndCapture(void *s, void **graph) { return sd_capture_end(s, (uint64_t *)graph); }
API int cuStreamEndCapture_ptsz(void *s, void **graph) { return sd_capture_end(THREAD_STREAM(s), (uint64_t *)graph); }
API int cuThreadExchangeStreamCaptureMode(int *mode)
{
    static __thread int current;
    int old = current;
    current = *mode;
    return *mode = old, OK;
}
API int cuEventCreate(void **event, unsigned flags) { return (void)flags, *event = sd_event(), OK; }
API int cuEventDestroy_v2(void *event) { return sd_event_destroy(event); }
API int cuEventElapsedTime(float *ms, void *from, void *to) { return *ms = sd_event_elapsed(from, to), OK; }
API int cuMemPoolGetAttribute(void *pool, int attribute, uint64_t *value)
{
    *value = attribute == 5 ? sd_pool_reserved(POOL(pool)) : sd_pool_used(POOL(pool));
    return OK;
}
API int cuMemPoolSetAttribute(void *pool, int attribute, uint64_t *value)
{
    return attribute == 4 ? sd_pool_threshold(POOL(pool), *value) : OK;
}
API int cuDeviceGetMemPool(void **pool, int d)
{
    return d < sd_devices() ? (*pool = POOL_HANDLE(sd_default_pool(sd_physical(d))), OK) : INVALID;
}
API int cuDeviceGetGraphMemAttribute(int device, int attribute, uint64_t *value)
{
    return (void)device, (void)attribute, *value = sd_graph_reserved(), OK;
}

API int cuMemAlloc(uint32_t *p, unsigned n)
{
    uint64_t key = 0;
    int code = sd_allocate(n, &key);
    return *p = (uint32_t)key, code;
}
API int cuMemAlloc_v2(uint64_t *p, size_t n) { return sd_allocate(n, p); }
API int cuMemAllocManaged(uint64_t *p, size_t n, unsigned f) { return (void)f, sd_allocate(n, p); }
API int cuMemAllocPitch(uint32_t *p, unsigned *pitch, unsigned w, unsigned h, unsigned e)
{
    (void)e;
    *pitch = (w + 511) / 512 * 512;
    return cuMemAlloc(p, *pitch * h);
}
API int cuMemAllocPitch_v2(uint64_t *p, size_t *pitch, size_t w, size_t h, unsigned e)
{
    (void)e;
    *pitch = (w + 511) / 512 * 512;
    return sd_allocate(*pitch * h, p);
}
API int cuMemAllocAsync(uint64_t *p, size_t n, void *s) { return sd_stream_allocate(s, DEFAULT_POOL, n, p); }
API int cuMemAllocAsync_ptsz(uint64_t *p, size_t n, void *s) { return sd_stream_allocate(THREAD_STREAM(s), DEFAULT_POOL, n, p); }
API int cuMemAllocFromPoolAsync(uint64_t *p, size_t n, void *o, void *s) { return sd_stream_allocate(s, POOL(o), n, p); }
API int cuMemAllocFromPoolAsync_ptsz(uint64_t *p, size_t n, void *o, void *s)
{
    return sd_stream_allocate(THREAD_STREAM(s), POOL(o), n, p);
}

struct shape {
    size_t w, h;
    unsigned format, channels;
};
struct shape3 {
    size_t w, h, d;
    unsigned format, channels, flags;
};
static uint64_t bytes_of(unsigned format) { return format == 1 || format == 8 ? 1 : format == 0x20 ? 4 : 2; }
static uint64_t some(uint64_t n) { return n == 0 ? 1 : n; }
static int array(void **a, uint64_t n) { return sd_allocate(n, (uint64_t *)a); }
API int cuArrayCreate(void **a, unsigned *s) { return array(a, (uint64_t)s[0] * some(s[1]) * bytes_of(s[2]) * s[3]); }
API int cuArrayCreate_v2(void **a, struct shape *s) { return array(a, s->w * some(s->h) * bytes_of(s->format) * s->channels); }
API int cuArray3DCreate(void **a, unsigned *s)
{
    return array(a, (uint64_t)s[0] * some(s[1]) * some(s[2]) * bytes_of(s[3]) * s[4]);
}
API int cuArray3DCreate_v2(void **a, struct shape3 *s)
{
    return array(a, s->w * some(s->h) * some(s->d) * bytes_of(s->format) * s->channels);
}
API int cuMipmappedArrayCreate(void **a, struct shape3 *s, unsigned levels)
{
    uint64_t sum = 0, w = s->w, h = s->h, d = s->d;
    for (unsigned i = 0; i < levels; i++, w = w > 1 ? w / 2 : w, h = h > 1 ? h / 2 : h, d = d > 1 ? d / 2 : d)
        sum += w * some(h) * some(d) * bytes_of(s->format) * s->channels;
    return array(a, sum);
}
API int cuArrayDestroy(void *a) { return sd_free((uint64_t)a); }
API int cuMipmappedArrayDestroy(void *a) { return sd_free((uint64_t)a); }

API int cuMemCreate(uint64_t *h, size_t n, int *where, uint64_t f)
{
    return (void)f, where[2] == 1 ? sd_handle_create(n, h) : (*h = 0xabc, OK);
}
API int cuMemAddressReserve(uint64_t *a, size_t n, size_t g, uint64_t w, uint64_t f)
{
    static uint64_t next = 0x600000000000;
    return (void)g, (void)w, (void)f, *a = __atomic_fetch_add(&next, (n + (1 << 21)) & ~0x1fffffull, __ATOMIC_SEQ_CST), OK;
}
API int cuMemAddressFree(uint64_t a, size_t n) { return (void)a, (void)n, OK; }
/* What is shared keeps the memory alive. */
API int cuMemExportToShareableHandle(uint64_t *o, uint64_t h, int t, uint64_t f) { return (void)t, (void)f, *o = h, sd_handle_share(h); }
API int cuMemMap(uint64_t a, size_t n, size_t o, uint64_t h, uint64_t f) { return (void)o, (void)f, h >= 0x90000000u ? OK : sd_map(a, n, h); }
API int cuMemUnmap(uint64_t a, size_t n) { return sd_unmap(a, n); }
API int cuMemRelease(uint64_t h) { return h >= 0x90000000u ? OK : sd_handle_release(h); }
API int cuMemRetainAllocationHandle(uint64_t *h, void *a) { return sd_retain((uint64_t)a, h); }
API int cuMemMapArrayAsync(void *l, unsigned n, void *s) { return (void)l, (void)n, (void)s, OK; }
API int cuMemMapArrayAsync_ptsz(void *l, unsigned n, void *s) { return (void)l, (void)n, (void)s, OK; }
API int cuMemImportFromShareableHandle(uint64_t *h, void *o, int t) { return (void)o, (void)t, *h = 0x90000001u, OK; }
API int cuIpcOpenMemHandle_v2(uint64_t *p, void *h, unsigned f) { return (void)h, (void)f, *p = 0x90001000u, OK; }
API int cuIpcCloseMemHandle(uint64_t p) { return (void)p, OK; }
API int cuImportExternalMemory(void **m, void *d) { return (void)d, *m = (void *)0x90002000u, OK; }
API int cuDestroyExternalMemory(void *m) { return (void)m, OK; }
API int cuMemPoolImportPointer(uint64_t *p, void *o, void *d) { return (void)o, (void)d, *p = 0x90003000u, OK; }
API int cuMemAllocHost_v2(void **p, size_t n) { return *p = malloc(n), OK; }

static int any_free(uint64_t p) { return sd_is_pooled(p) ? sd_pool_free(p) : sd_free(p); }
API int cuMemFree(uint32_t p) { return sd_free(p); }
API int cuMemFree_v2(uint64_t p) { return any_free(p); }
API int cuMemFreeAsync(uint64_t p, void *s) { return sd_stream_free(s, p); }
API int cuMemFreeAsync_ptsz(uint64_t p, void *s) { return sd_stream_free(THREAD_STREAM(s), p); }
API int cuMemPoolCreate(void **o, int *w) /* managed memory is on a device, whatever place it prefers */
{
    return *o = POOL_HANDLE(sd_pool_create(w[2] == 1 || w[0] == 2, sd_physical(w[2] == 1 ? w[3] : 0))), OK;
}
API int cuMemPoolDestroy(void *o) { return sd_pool_destroy(POOL(o)); }
API int cuMemPoolTrimTo(void *o, size_t keep) { return sd_pool_trim(POOL(o), keep); }

API int cuGraphCreate(void **g, unsigned f) { return (void)f, *g = (void *)sd_graph(), OK; }
static int node(void **n, void *g, unsigned char *p, size_t at)
{
    uint64_t bytes;
    memcpy(&bytes, p + at, 8);
    return sd_graph_node((uint64_t)g, bytes, (uint64_t *)n);
}
API int cuGraphAddMemAllocNode(void **n, void *g, void *d, size_t c, void *p) { return (void)d, (void)c, node(n, g, p, 104); }
API int cuGraphAddNode(void **n, void *g, void *d, size_t c, int *p)
{
    (void)d, (void)c;
    return *p == 10 ? node(n, g, (unsigned char *)p, 120) : OK;
}
API int cuGraphAddNode_v2(void **n, void *g, void *d, void *e, size_t c, int *p) { return (void)e, cuGraphAddNode(n, g, d, c, p); }
API int cuGraphAddNode_v3(void **n, void *g, void *d, void *e, size_t c, int *p) { return (void)e, cuGraphAddNode(n, g, d, c, p); }
static int exec(void **e, void *g) { return *e = (void *)sd_graph_instantiate((uint64_t)g), OK; }
API int cuGraphInstantiate(void **e, void *g, void *n, char *l, size_t s) { return (void)n, (void)l, (void)s, exec(e, g); }
API int cuGraphInstantiate_v2(void **e, void *g, void *n, char *l, size_t s) { return (void)n, (void)l, (void)s, exec(e, g); }
API int cuGraphInstantiateWithFlags(void **e, void *g, uint64_t f) { return (void)f, exec(e, g); }
API int cuGraphInstantiateWithParams(void **e, void *g, void *p) { return (void)p, exec(e, g); }
API int cuGraphInstantiateWithParams_ptsz(void **e, void *g, void *p) { return (void)p, exec(e, g); }
API int cuGraphDestroy(void *g) { return (void)g, OK; }
API int cuGraphExecDestroy(void *e) { return (void)e, OK; }
API int cuDeviceGraphMemTrim(int d) { return (void)d, sd_graph_trim(); }
static int primary_live[MOST_DEVICES];
static int make_context(void **c, int d, int primary)
{
    int there = primary && __atomic_exchange_n(&primary_live[sd_physical(d)], 1, __ATOMIC_SEQ_CST);
    int code = there || state->context_bytes == 0 ? OK : sd_take(state->context_bytes, sd_physical(d));
    if (code == OK)
        *c = (void *)(primary ? sd_primary(d) : sd_context_make(d));
    return code;
}
/* A primary context is released, not destroyed. */
API int cuCtxDestroy(void *c)
{
    int d = sd_physical(sd_context_device((uint64_t)c));
    if (!sd_context_end((uint64_t)c))
        return 201;
    sd_free_all(0);
    sd_give(state->context_bytes, d);
    return OK;
}
API int cuCtxDestroy_v2(void *c) { return cuCtxDestroy(c); }
static int release_primary(int d)
{
    sd_free_all(0);
    if (__atomic_exchange_n(&primary_live[sd_physical(d)], 0, __ATOMIC_SEQ_CST))
        sd_give(state->context_bytes, sd_physical(d));
    return OK;
}
API int cuCtxCreate(void **c, unsigned f, int d) { return (void)f, make_context(c, d, 0); }
API int cuCtxCreate_v2(void **c, unsigned f, int d) { return (void)f, make_context(c, d, 0); }
API int cuCtxCreate_v3(void **c, void *a, int n, unsigned f, int d) { return (void)a, (void)n, (void)f, make_context(c, d, 0); }
API int cuCtxCreate_v4(void **c, void *p, unsigned f, int d) { return (void)p, (void)f, make_context(c, d, 0); }
API int cuGreenCtxCreate(void **c, void *r, int d, unsigned f) { return (void)r, (void)f, make_context(c, d, 0); }
API int cuGLCtxCreate(void **c, unsigned f, int d) { return (void)f, make_context(c, d, 0); }
API int cuGLCtxCreate_v2(void **c, unsigned f, int d) { return (void)f, make_context(c, d, 0); }
API int cuVDPAUCtxCreate(void **c, unsigned f, int d, uint32_t v, void *g) { return (void)f, (void)v, (void)g, make_context(c, d, 0); }
API int cuVDPAUCtxCreate_v2(void **c, unsigned f, int d, uint32_t v, void *g) { return (void)f, (void)v, (void)g, make_context(c, d, 0); }
API int cuDevicePrimaryCtxRetain(void **c, int d) { return make_context(c, d, 1); }
API int cuDevicePrimaryCtxRelease(int d) { return release_primary(d); }
API int cuDevicePrimaryCtxRelease_v2(int d) { return release_primary(d); }
API int cuDevicePrimaryCtxReset(int d) { return (void)d, sd_free_all(0), OK; }
API int cuDevicePrimaryCtxReset_v2(int d) { return (void)d, sd_free_all(0), OK; }
API int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *active) { return (void)d, *f = 0, *active = 0, OK; }
API int cuMemGetInfo(uint32_t *f, uint32_t *t) { return *f = 0xffff0000u, *t = 0xffff0000u, OK; }
API int cuMemGetInfo_v2(size_t *f, size_t *t) { return sd_memory(sd_physical(sd_device()), f, t); }
API int cuDeviceTotalMem(uint32_t *t, int d) { return (void)d, *t = 0xffff0000u, OK; }
API int cuDeviceTotalMem_v2(size_t *t, int d) { return *t = sd_bytes(sd_physical(d)), OK; }

API int cuLaunch(void *f) { return sd_launch(NULL, f); }
API int cuLaunchGrid(void *f, int w, int h) { return (void)w, (void)h, sd_launch(NULL, f); }
API int cuLaunchGridAsync(void *f, int w, int h, void *s) { return (void)w, (void)h, sd_launch(s, f); }
#define SIZES unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned m
#define NO_SIZES (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)m
API int cuLaunchKernel(void *f, SIZES, void *s, void **p, void **e) { return NO_SIZES, (void)e, sd_launch(s, sd_kernel(f, p)); }
API int cuLaunchKernel_ptsz(void *f, SIZES, void *s, void **p, void **e) { return NO_SIZES, (void)e, sd_launch(THREAD_STREAM(s), sd_kernel(f, p)); }
API int cuLaunchCooperativeKernel(void *f, SIZES, void *s, void **p) { return NO_SIZES, (void)p, sd_launch(s, f); }
API int cuLaunchCooperativeKernel_ptsz(void *f, SIZES, void *s, void **p) { return NO_SIZES, (void)p, sd_launch(THREAD_STREAM(s), f); }
API int cuLaunchKernelEx(void *c, void *f, void **p, void **e) { return (void)c, (void)p, (void)e, sd_launch(NULL, f); }
API int cuLaunchKernelEx_ptsz(void *c, void *f, void **p, void **e) { return (void)c, (void)p, (void)e, sd_launch(NULL, f); }
API int cuLaunchCooperativeKernelMultiDevice(void *l, unsigned n, unsigned f) { return (void)l, (void)n, (void)f, sd_launch(NULL, NULL); }
static int graph(void *e, void *s)
{
    int code = sd_graph_launch((uint64_t)e);
    return code == OK ? sd_launch(s, NULL) : code;
}
API int cuGraphLaunch(void *e, void *s) { return graph(e, s); }
API int cuGraphLaunch_ptsz(void *e, void *s) { return graph(e, s); }
API int cuCtxSynchronize(void) { return sd_synchronise(); }
API int cuCtxSynchronize_v2(void *c) { return (void)c, sd_synchronise(); }
API int cuStreamSynchronize(void *s) { return sd_stream_synchronise(s); }
API int cuStreamSynchronize_ptsz(void *s) { return sd_stream_synchronise(THREAD_STREAM(s)); }
API int cuStreamQuery(void *s) { return sd_stream_query(s); }
API int cuStreamQuery_ptsz(void *s) { return sd_stream_query(THREAD_STREAM(s)); }
API int cuEventRecord(void *e, void *s) { return sd_event_record(e, s); }
API int cuEventRecord_ptsz(void *e, void *s) { return sd_event_record(e, THREAD_STREAM(s)); }
API int cuEventRecordWithFlags(void *e, void *s, unsigned f) { return (void)f, sd_event_record(e, s); }
API int cuEventRecordWithFlags_ptsz(void *e, void *s, unsigned f) { return (void)f, sd_event_record(e, THREAD_STREAM(s)); }
API int cuEventSynchronize(void *e) { return sd_event_wait(e); }
API int cuEventQuery(void *e) { return sd_event_query(e); }
API int cuMemcpyDtoH_v2(void *t, uint64_t f, size_t n) { return (void)t, (void)f, (void)n, sd_synchronise(); }
API int cuMemcpyDtoH_v2_ptds(void *t, uint64_t f, size_t n) { return (void)t, (void)f, (void)n, sd_synchronise(); }

/* On the device: they take its time as kernels do. */
API int cuMemcpyDtoD_v2(uint64_t t, uint64_t f, size_t n) { return (void)t, (void)f, (void)n, sd_launch(NULL, NULL); }
API int cuMemcpyDtoD_v2_ptds(uint64_t t, uint64_t f, size_t n) { return (void)t, (void)f, (void)n, sd_launch((void *)2, NULL); }
API int cuMemcpyDtoDAsync_v2(uint64_t t, uint64_t f, size_t n, void *s) { return (void)t, (void)f, (void)n, sd_launch(s, NULL); }
API int cuMemcpyDtoDAsync_v2_ptsz(uint64_t t, uint64_t f, size_t n, void *s)
{
    return (void)t, (void)f, (void)n, sd_launch(THREAD_STREAM(s), NULL);
}
#define SETS(bits, type)                                                                                               \
    API int cuMemsetD##bits##_v2(uint64_t t, type v, size_t n) { return (void)t, (void)v, (void)n, sd_launch(NULL, NULL); } \
    API int cuMemsetD##bits##_v2_ptds(uint64_t t, type v, size_t n)                                                    \
    {                                                                                                                  \
        return (void)t, (void)v, (void)n, sd_launch((void *)2, NULL);                                                  \
    }                                                                                                                  \
    API int cuMemsetD##bits##Async(uint64_t t, type v, size_t n, void *s)                                              \
    {                                                                                                                  \
        return (void)t, (void)v, (void)n, sd_launch(s, NULL);                                                          \
    }                                                                                                                  \
    API int cuMemsetD##bits##Async_ptsz(uint64_t t, type v, size_t n, void *s)                                         \
    {                                                                                                                  \
        return (void)t, (void)v, (void)n, sd_launch(THREAD_STREAM(s), NULL);                                           \
    }                                                                                                                  \
    API int cuMemsetD2D##bits##_v2(uint64_t t, size_t p, type v, size_t w, size_t h)                                   \
    {                                                                                                                  \
        return (void)t, (void)p, (void)v, (void)w, (void)h, sd_launch(NULL, NULL);                                     \
    }                                                                                                                  \
    API int cuMemsetD2D##bits##_v2_ptds(uint64_t t, size_t p, type v, size_t w, size_t h)                              \
    {                                                                                                                  \
        return (void)t, (void)p, (void)v, (void)w, (void)h, sd_launch((void *)2, NULL);                                \
    }                                                                                                                  \
    API int cuMemsetD2D##bits##Async(uint64_t t, size_t p, type v, size_t w, size_t h, void *s)                        \
    {                                                                                                                  \
        return (void)t, (void)p, (void)v, (void)w, (void)h, sd_launch(s, NULL);                                        \
    }                                                                                                                  \
    API int cuMemsetD2D##bits##Async_ptsz(uint64_t t, size_t p, type v, size_t w, size_t h, void *s)                   \
    {                                                                                                                  \
        return (void)t, (void)p, (void)v, (void)w, (void)h, sd_launch(THREAD_STREAM(s), NULL);                         \
    }
SETS(8, unsigned char)
SETS(16, unsigned short)
SETS(32, unsigned)

/* A lookup names the function without suffix; which symbol that means depends on version and flags. */
API int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, void *status)
{
    static const char *const forms[] = {"_v2_ptsz", "_v2_ptds", "_ptsz", "_v2", ""};
    char text[128];
    void *self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    (void)status;
    *found = NULL;
    for (int i = (flags & 2) != 0 ? 0 : 3; i < 5 && *found == NULL; i++) {
        if (strncmp(forms[i], "_v2", 3) == 0 && version < 3020)
            continue;
        snprintf(text, sizeof text, "%s%s", name, forms[i]);
        *found = dlsym(self, text);
    }
    return *found == NULL ? 500 : OK;
}
API int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, found, version, flags, NULL);
}

API int nvmlInit_v2(void) { return OK; }
API int nvmlDeviceGetUUID(void *d, char *text, unsigned n) { return (void)d, snprintf(text, n, "GPU-software"), OK; }
API int nvmlDeviceGetMemoryInfo(void *d, uint64_t *info)
{
    (void)d;
    info[0] = state->device_bytes;
    info[2] = state->used;
    return info[1] = info[0] - info[2], OK;
}
API int nvmlDeviceGetMemoryInfo_v2(void *d, uint64_t *info)
{
    (void)d;
    info[1] = state->device_bytes;
    info[2] = 1 << 20;
    info[4] = state->used;
    return info[3] = info[1] - info[4], OK;
}
