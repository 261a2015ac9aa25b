/* libamdhip64.so.7, as far as the interposer and its tests look at it. */
#include "gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define POOL(o) ((uint64_t)(o)-0x100)
#define POOL_HANDLE(i) ((void *)((i) + 0x100))

API int hipGetDevice(int *device) { return *device = sd_device(), OK; }
API int hipSetDevice(int device) { return sd_set_device(device); }
API int hipGetDeviceCount(int *count) { return *count = sd_devices(), OK; }
API int hipDeviceGetUuid(char *uuid, int d)
{
    for (int i = 0; i < 16; i++) /* the digits of the chip's id, as characters */
        uuid[i] = i % 2 == 0 ? 'a' : (char)('0' + sd_physical(d));
    return OK;
}
API int hipStreamCreateWithFlags(void **s, unsigned f) { return *s = sd_stream(f), OK; }
API int hipStreamGetFlags(void *s, unsigned *f) { return sd_stream_flags(s, f); }
API int hipStreamGetDevice(void *s, int *d) { return *d = sd_context_device(sd_stream_context(s)), OK; }
API int hipStreamDestroy(void *s) { return sd_stream_destroy(s); }
API int hipStreamWaitEvent(void *s, void *e, unsigned f) { return (void)f, sd_stream_wait(s, e); }
#define THREAD_STREAM(s) ((s) == NULL ? (void *)2 : (s))
API int hipStreamWaitEvent_spt(void *s, void *e, unsigned f) { return (void)f, sd_stream_wait(THREAD_STREAM(s), e); }
API int hipStreamGetCaptureInfo_v2(void *s, int *status, uint64_t *id, void **graph, void **d, size_t *n)
{
    (void)d, (void)n;
    uint64_t made = 0;
    *status = sd_capturing(s, &made);
    *id = 1;
    return *graph = (void *)made, OK;
}
API int hipStreamBeginCapture(void *s, int mode) { return (void)mode, sd_capture_begin(s, sd_graph()); }
API int hipStreamBeginCapture_spt(void *s, int mode) { return (void)mode, sd_capture_begin(THREAD_STREAM(s), sd_graph()); }
API int hipStreamBeginCaptureToGraph(void *s, void *g, void *d, void *e, size_t n, int mode)
{
    return (void)d, (void)e, (void)n, (void)mode, sd_capture_begin(s, (uint64_t)g);
}
API int hipStreamEndCapture(void *s, void **graph) { return sd_capture_end(s, (uint64_t *)graph); }
API int hipStreamEndCapture_spt(void *s, void **graph) { return sd_capture_end(THREAD_STREAM(s), (uint64_t *)graph); }
API int hipThreadExchangeStreamCaptureMode(int *mode) { return (void)mode, OK; }
API int hipEventCreateWithFlags(void **event, unsigned flags) { return (void)flags, *event = sd_event(), OK; }
API int hipEventDestroy(void *event) { return sd_event_destroy(event); }
API int hipEventElapsedTime(float *ms, void *from, void *to) { return *ms = sd_event_elapsed(from, to), OK; }
API int hipMemPoolGetAttribute(void *pool, int attribute, uint64_t *value)
{
    return *value = attribute == 5 ? sd_pool_reserved(POOL(pool)) : sd_pool_used(POOL(pool)), OK;
}
API int hipMemPoolSetAttribute(void *pool, int attribute, uint64_t *value)
{
    return attribute == 4 ? sd_pool_threshold(POOL(pool), *value) : OK;
}
API int hipDeviceGetMemPool(void **pool, int d)
{
    return d < sd_devices() ? (*pool = POOL_HANDLE(sd_default_pool(sd_physical(d))), OK) : INVALID;
}
API int hipDeviceGetGraphMemAttribute(int device, int attribute, uint64_t *value)
{
    return (void)device, (void)attribute, *value = sd_graph_reserved(), OK;
}

static int plain(void **p, uint64_t n) { return sd_allocate(n, (uint64_t *)p); }
/* As ROCm does: one entry point of the library calls another through the linker's table, where a preloaded one comes first. */
API int hipMalloc(void **p, size_t n) { return plain(p, n); }
API int hipExtMallocWithFlags(void **p, size_t n, unsigned f) { return (void)f, hipMalloc(p, n); }
API int hipMallocManaged(void **p, size_t n, unsigned f) { return (void)f, hipMalloc(p, n); }
API int hipMemAllocPitch(void **p, size_t *pitch, size_t w, size_t h, unsigned e)
{
    (void)e;
    *pitch = (w + 511) / 512 * 512;
    return hipMalloc(p, *pitch * h);
}
API int hipMallocPitch(void **p, size_t *pitch, size_t w, size_t h) { return hipMemAllocPitch(p, pitch, w, h, 4); }
struct pitched {
    void *pointer;
    size_t pitch, width, height;
};
struct extent {
    size_t w, h, d;
};
struct channels {
    int x, y, z, w, kind;
};
static uint64_t some(uint64_t n) { return n == 0 ? 1 : n; }
static uint64_t width_of(struct channels *c) { return (uint64_t)(c->x + c->y + c->z + c->w) / 8; }
API int hipMalloc3D(struct pitched *p, struct extent e)
{
    p->pitch = (e.w + 511) / 512 * 512;
    return hipMalloc(&p->pointer, p->pitch * some(e.h) * some(e.d));
}
API int hipMallocArray(void **a, struct channels *c, size_t w, size_t h, unsigned f)
{
    return (void)f, plain(a, w * some(h) * width_of(c));
}
API int hipMalloc3DArray(void **a, struct channels *c, struct extent e, unsigned f)
{
    return (void)f, plain(a, e.w * some(e.h) * some(e.d) * width_of(c));
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
API int hipArrayCreate(void **a, struct shape *s) { return plain(a, s->w * some(s->h) * bytes_of(s->format) * s->channels); }
API int hipArray3DCreate(void **a, struct shape3 *s)
{
    return plain(a, s->w * some(s->h) * some(s->d) * bytes_of(s->format) * s->channels);
}
static uint64_t levels_of(uint64_t w, uint64_t h, uint64_t d, uint64_t each, unsigned levels)
{
    uint64_t sum = 0;
    for (unsigned i = 0; i < levels; i++, w = w > 1 ? w / 2 : w, h = h > 1 ? h / 2 : h, d = d > 1 ? d / 2 : d)
        sum += w * some(h) * some(d) * each;
    return sum;
}
API int hipMallocMipmappedArray(void **a, struct channels *c, struct extent e, unsigned levels, unsigned f)
{
    return (void)f, plain(a, levels_of(e.w, e.h, e.d, width_of(c), levels));
}
API int hipMipmappedArrayCreate(void **a, struct shape3 *s, unsigned levels)
{
    return plain(a, levels_of(s->w, s->h, s->d, bytes_of(s->format) * s->channels, levels));
}
API int hipMallocAsync(void **p, size_t n, void *s) { return sd_stream_allocate(s, DEFAULT_POOL, n, (uint64_t *)p); }
API int hipMallocFromPoolAsync(void **p, size_t n, void *o, void *s) { return sd_stream_allocate(s, POOL(o), n, (uint64_t *)p); }

API int hipMemCreate(void **h, size_t n, int *where, uint64_t f)
{
    return (void)f, where[2] == 1 ? sd_handle_create(n, (uint64_t *)h) : (*h = (void *)0xabc, OK);
}
API int hipMemMap(void *a, size_t n, size_t o, void *h, uint64_t f)
{
    (void)o, (void)f;
    return (uint64_t)h >= 0x90000000u ? OK : sd_map((uint64_t)a, n, (uint64_t)h);
}
API int hipMemUnmap(void *a, size_t n) { return sd_unmap((uint64_t)a, n); }
API int hipMemRelease(void *h) { return (uint64_t)h >= 0x90000000u ? OK : sd_handle_release((uint64_t)h); }
API int hipMemRetainAllocationHandle(void **h, void *a) { return sd_retain((uint64_t)a, (uint64_t *)h); }
API int hipModuleUnload(void *m) { return (void)m, OK; }
API int hipLibraryUnload(void *l) { return (void)l, OK; }
API int hipMemExportToShareableHandle(uint64_t *o, void *h, int t, uint64_t f)
{
    return (void)t, (void)f, *o = (uint64_t)h, sd_handle_share((uint64_t)h);
}
API int hipMemMapArrayAsync(void *l, unsigned n, void *s) { return (void)l, (void)n, (void)s, OK; }
API int hipMemImportFromShareableHandle(void **h, void *o, int t) { return (void)o, (void)t, *h = (void *)0x90000001u, OK; }
API int hipIpcOpenMemHandle(void **p, void *h, unsigned f) { return (void)h, (void)f, *p = (void *)0x90001000u, OK; }
API int hipIpcCloseMemHandle(void *p) { return (void)p, OK; }
API int hipImportExternalMemory(void **m, void *d) { return (void)d, *m = (void *)0x90002000u, OK; }
API int hipDestroyExternalMemory(void *m) { return (void)m, OK; }
API int hipMemPoolImportPointer(void **p, void *o, void *d) { return (void)o, (void)d, *p = (void *)0x90003000u, OK; }
API int hipHostMalloc(void **p, size_t n, unsigned f) { return (void)f, *p = malloc(n), OK; }
API int hipHostAlloc(void **p, size_t n, unsigned f) { return hipHostMalloc(p, n, f); }
API int hipMallocHost(void **p, size_t n) { return hipHostMalloc(p, n, 0); }
API int hipMemAllocHost(void **p, size_t n) { return hipHostMalloc(p, n, 0); }
API int hipHostRegister(void *p, size_t n, unsigned f) { return (void)p, (void)n, (void)f, OK; }
API int hipHostFree(void *p) { return (void)p, OK; }
API int hipFreeHost(void *p) { return (void)p, OK; }
API int hipGraphAddMemFreeNode(void **node, void *g, const void *d, size_t n, void *p)
{
    return (void)g, (void)d, (void)n, (void)p, *node = NULL, OK;
}
API int hipDrvGraphAddMemFreeNode(void **node, void *g, const void *d, size_t n, void *p)
{
    return hipGraphAddMemFreeNode(node, g, d, n, p);
}
API int hipInit(unsigned flags) { return flags == 0 ? OK : INVALID; }
API int hipModuleLoad(void **m, const char *path) { return (void)path, *m = NULL, OK; }
API int hipModuleLoadData(void **m, const void *image) { return (void)image, *m = NULL, OK; }
API int hipModuleGetFunction(void **f, void *m, const char *name) { return (void)m, *f = sd_function(name), OK; }
API int hipDeviceSetLimit(int limit, size_t value) { return limit == 0 ? OK : sd_limit(limit, value); }

static int any_free(void *p) { return sd_is_pooled((uint64_t)p) ? sd_pool_free((uint64_t)p) : sd_free((uint64_t)p); }
API int hipFree(void *p) { return any_free(p); }
API int hipFreeAsync(void *p, void *s) { return sd_stream_free(s, (uint64_t)p); }
API int hipFreeArray(void *a) { return any_free(a); }
API int hipArrayDestroy(void *a) { return any_free(a); }
API int hipFreeMipmappedArray(void *a) { return any_free(a); }
API int hipMipmappedArrayDestroy(void *a) { return any_free(a); }
API int hipMemPoolCreate(void **o, int *w) { return *o = POOL_HANDLE(sd_pool_create(w[2] == 1, sd_physical(w[3]))), OK; }
API int hipMemPoolDestroy(void *o) { return sd_pool_destroy(POOL(o)); }
API int hipMemPoolTrimTo(void *o, size_t keep) { return sd_pool_trim(POOL(o), keep); }
API int hipDeviceReset(void) { return sd_free_all(1), OK; }
API int hipDevicePrimaryCtxReset(int d) { return (void)d, sd_free_all(1), OK; }

API int hipGraphCreate(void **g, unsigned f) { return (void)f, *g = (void *)sd_graph(), OK; }
static int node(void **n, void *g, unsigned char *p, size_t at)
{
    uint64_t bytes;
    memcpy(&bytes, p + at, 8);
    return sd_graph_node((uint64_t)g, bytes, (uint64_t *)n);
}
API int hipGraphAddMemAllocNode(void **n, void *g, void *d, size_t c, void *p) { return (void)d, (void)c, node(n, g, p, 104); }
API int hipGraphAddNode(void **n, void *g, void *d, size_t c, int *p)
{
    (void)d, (void)c;
    return *p == 10 ? node(n, g, (unsigned char *)p, 120) : OK;
}
static int exec(void **e, void *g) { return *e = (void *)sd_graph_instantiate((uint64_t)g), OK; }
API int hipGraphInstantiate(void **e, void *g, void *n, char *l, size_t s) { return (void)n, (void)l, (void)s, exec(e, g); }
API int hipGraphInstantiateWithFlags(void **e, void *g, unsigned long long f) { return (void)f, exec(e, g); }
API int hipGraphInstantiateWithParams(void **e, void *g, void *p) { return (void)p, exec(e, g); }
API int hipGraphDestroy(void *g) { return (void)g, OK; }
API int hipGraphExecDestroy(void *e) { return (void)e, OK; }
API int hipDeviceGraphMemTrim(int d) { return (void)d, sd_graph_trim(); }
API int hipMemGetInfo(size_t *f, size_t *t) { return sd_memory(sd_physical(sd_device()), f, t); }
API int hipDeviceTotalMem(size_t *t, int d) { return *t = sd_bytes(sd_physical(d)), OK; }
static int properties(char *p, size_t at) { return memset(p, 0, 1472), memcpy(p + at, &state->device_bytes, 8), OK; }
API int hipGetDeviceProperties(char *p, int d) { return (void)d, properties(p, 256); }
API int hipGetDevicePropertiesR0000(char *p, int d) { return (void)d, properties(p, 256); }
API int hipGetDevicePropertiesR0600(char *p, int d) { return (void)d, properties(p, 288); }

struct dim3 {
    uint32_t x, y, z;
};
#define SHAPE const void *f, struct dim3 g, struct dim3 b, void **a
#define NO_SHAPE (void)g, (void)b, (void)a, (void)m
API int hipLaunchKernel(SHAPE, size_t m, void *s) { return NO_SHAPE, sd_launch(s, f); }
API int hipLaunchKernel_spt(SHAPE, size_t m, void *s) { return NO_SHAPE, sd_launch(THREAD_STREAM(s), f); }
API int hipLaunchCooperativeKernel(SHAPE, unsigned m, void *s) { return NO_SHAPE, sd_launch(s, f); }
API int hipLaunchCooperativeKernel_spt(SHAPE, unsigned m, void *s) { return NO_SHAPE, sd_launch(THREAD_STREAM(s), f); }
API int hipExtLaunchKernel(SHAPE, size_t m, void *s, void *x, void *y, int z)
{
    return NO_SHAPE, (void)x, (void)y, (void)z, sd_launch(s, f);
}
API int hipLaunchKernelExC(void *c, void *f, void **a) { return (void)c, (void)a, sd_launch(NULL, f); }
API int hipDrvLaunchKernelEx(void *c, void *f, void **p, void **e) { return (void)c, (void)p, (void)e, sd_launch(NULL, f); }
#define SIZES uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz
#define NO_SIZES (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)m
API int hipModuleLaunchKernel(void *f, SIZES, unsigned m, void *s, void **p, void **e)
{
    return NO_SIZES, (void)e, sd_launch(s, sd_kernel(f, p));
}
API int hipModuleLaunchCooperativeKernel(void *f, SIZES, unsigned m, void *s, void **p) { return NO_SIZES, (void)p, sd_launch(s, f); }
API int hipExtModuleLaunchKernel(void *f, SIZES, size_t m, void *s, void **p, void **e, void *x, void *y, uint32_t z)
{
    return NO_SIZES, (void)p, (void)e, (void)x, (void)y, (void)z, sd_launch(s, f);
}
API int hipHccModuleLaunchKernel(void *f, SIZES, size_t m, void *s, void **p, void **e, void *x, void *y)
{
    return NO_SIZES, (void)p, (void)e, (void)x, (void)y, sd_launch(s, f);
}
static int graph(void *e, void *s)
{
    int code = sd_graph_launch((uint64_t)e);
    return code == OK ? sd_launch(s, NULL) : code;
}
API int hipGraphLaunch(void *e, void *s) { return graph(e, s); }
API int hipGraphLaunch_spt(void *e, void *s) { return graph(e, s); }
API int hipDeviceSynchronize(void) { return sd_synchronise(); }
API int hipCtxSynchronize(void) { return sd_synchronise(); }
API int hipStreamSynchronize(void *s) { return sd_stream_synchronise(s); }
API int hipStreamSynchronize_spt(void *s) { return sd_stream_synchronise(THREAD_STREAM(s)); }
API int hipMemcpy(void *t, const void *f, size_t n, int k) { return (void)t, (void)f, (void)n, k == 2 ? sd_synchronise() : k == 3 ? sd_launch(NULL, NULL) : OK; }
API int hipMemcpy_spt(void *t, const void *f, size_t n, int k) { return (void)t, (void)f, (void)n, k == 2 ? sd_synchronise() : k == 3 ? sd_launch(NULL, NULL) : OK; }
API int hipMemcpyWithStream(void *t, const void *f, size_t n, int k, void *s) { return (void)s, hipMemcpy(t, f, n, k); }
API int hipMemcpyAsync(void *t, const void *f, size_t n, int k, void *s)
{
    return (void)t, (void)f, (void)n, k == 3 ? sd_launch(s, NULL) : OK;
}
API int hipMemcpyAsync_spt(void *t, const void *f, size_t n, int k, void *s) { return hipMemcpyAsync(t, f, n, k, THREAD_STREAM(s)); }
API int hipMemcpyDtoD(void *t, void *f, size_t n) { return hipMemcpy(t, f, n, 3); }
API int hipMemcpyDtoDAsync(void *t, void *f, size_t n, void *s) { return hipMemcpyAsync(t, f, n, 3, s); }
#define SET(name, type) \
    API int name(void *t, type v, size_t n) { return (void)t, (void)v, (void)n, sd_launch(NULL, NULL); }
#define SET_ASYNC(name, type) \
    API int name(void *t, type v, size_t n, void *s) { return (void)t, (void)v, (void)n, sd_launch(s, NULL); }
SET(hipMemset, int)
SET(hipMemset_spt, int)
SET(hipMemsetD8, unsigned char)
SET(hipMemsetD16, unsigned short)
SET(hipMemsetD32, int)
SET_ASYNC(hipMemsetAsync, int)
SET_ASYNC(hipMemsetAsync_spt, int)
SET_ASYNC(hipMemsetD8Async, unsigned char)
SET_ASYNC(hipMemsetD16Async, unsigned short)
SET_ASYNC(hipMemsetD32Async, int)
API int hipLaunchByPtr(const void *f) { return sd_launch(NULL, f); }
API int hipLaunchCooperativeKernelMultiDevice(void *l, int n, unsigned f) { return (void)l, (void)n, (void)f, sd_launch(NULL, NULL); }
API int hipExtLaunchMultiKernelMultiDevice(void *l, int n, unsigned f) { return (void)l, (void)n, (void)f, sd_launch(NULL, NULL); }
API int hipModuleLaunchCooperativeKernelMultiDevice(void *l, unsigned n, unsigned f)
{
    return (void)l, (void)n, (void)f, sd_launch(NULL, NULL);
}
API int hipMemcpyDtoH(void *t, void *f, size_t n) { return hipMemcpy(t, f, n, 2); }
API int hipStreamQuery(void *s) { return sd_stream_query(s); }
API int hipStreamQuery_spt(void *s) { return sd_stream_query(THREAD_STREAM(s)); }
API int hipEventRecord(void *e, void *s) { return sd_event_record(e, s); }
API int hipEventRecordWithFlags(void *e, void *s, unsigned f) { return (void)f, sd_event_record(e, s); }
API int hipEventRecord_spt(void *e, void *s) { return sd_event_record(e, THREAD_STREAM(s)); }
API int hipEventSynchronize(void *e) { return sd_event_wait(e); }
API int hipEventQuery(void *e) { return sd_event_query(e); }
static int look_up(const char *name, void **found, int per_thread)
{
    char text[128];
    void *self = dlopen("libamdhip64.so.7", RTLD_LAZY | RTLD_NOLOAD);
    snprintf(text, sizeof text, "%s_spt", name);
    *found = per_thread ? dlsym(self, text) : NULL;
    if (*found == NULL)
        *found = dlsym(self, name);
    return *found == NULL ? 500 : OK;
}
API int hipGetProcAddress(const char *name, void **found, int version, uint64_t flags, void *status)
{
    return (void)version, (void)status, look_up(name, found, (flags & 2) != 0);
}
API int hipGetProcAddress_spt(const char *name, void **found, int version, uint64_t flags, void *status)
{
    return (void)version, (void)status, (void)flags, look_up(name, found, 1);
}
API int hipGetDriverEntryPoint(const char *name, void **found, uint64_t flags, void *status)
{
    return (void)status, look_up(name, found, (flags & 2) != 0);
}
API int hipGetDriverEntryPoint_spt(const char *name, void **found, uint64_t flags, void *status)
{
    return (void)flags, (void)status, look_up(name, found, 1);
}
