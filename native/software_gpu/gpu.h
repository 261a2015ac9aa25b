/* The software GPU: a driver that needs no hardware. Memory and device time are real inside it: bytes are counted for all
 * processes, kernels take the device one after the other, and what a process held is free again when it is gone. For tests it
 * fails or blocks on request.
 *
 * Its state is a file of its own, which AIMGPU_SOFTWARE_GPU names. The interposer neither opens nor knows it, so what is read
 * there was measured by the driver alone. */
#ifndef SOFTWARE_GPU_H
#define SOFTWARE_GPU_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, BAD_HANDLE = 400, NOT_READY = 600, CAPTURE_BROKEN = 901 };
enum { MOST_PROCESSES = 256, MOST_DEVICES = 64, COLLECTIVES = 64, LOG = 8192 };

/* Shared by all processes; tests read it. Mirrored in src/aimgpu/hardware/software/state.py. */
struct state {
    uint64_t device_bytes, used, peak;
    uint64_t kernel_ns;  /* how long a kernel takes whose handle does not say so */
    uint64_t call_ns;    /* how long every allocation takes, to widen races */
    uint64_t fail_after; /* allocations after this many fail; 0: none */
    uint64_t allocations, frees, launches;
    uint64_t pool_grain;
    uint64_t context_bytes; /* what every context takes */
    uint64_t devices;       /* how many there are; 0: one */
    uint64_t block_launches; /* a launch blocks until so many have entered the driver; 0: none does */
    uint64_t entered;
    uint64_t events;        /* live ones */
    uint64_t bad_streams;   /* uses of destroyed streams */
    uint64_t bad_captures;  /* queries of events that belong to a capture */
    uint64_t bad_contexts;  /* events used with streams of another context */
    uint64_t bad_pools;     /* uses of destroyed pools, which end a program on the real driver */
    uint64_t pool_scatters; /* what is free in a pool is in pieces too small for the next request */
    uint64_t block_bytes;   /* small allocations are taken out of blocks of this size; 0: they are not */
    uint64_t stream_bytes;  /* what every stream takes, in whole blocks, and keeps for the next one */
    uint64_t counts;        /* how often NVML listed the processes */
    uint64_t pid_offset;    /* NVML lists pids of another namespace */
    uint64_t counting;      /* 1 + the slot of the process that counts memory now; 0: nobody does */
    uint64_t free_at[MOST_DEVICES]; /* one queue per device */
    uint64_t used_on[MOST_DEVICES];
    uint64_t bytes_of[MOST_DEVICES]; /* where devices differ in size; 0: device_bytes */
    uint64_t busy_ns[MOST_DEVICES];  /* device time that launches took, or will have taken */
    uint64_t arrived[COLLECTIVES]; /* devices that launched this collective, as bits */
    struct {
        uint64_t pid, used;
        uint64_t locked; /* it holds a lock on the byte behind the state for as long as it lives */
        uint64_t launches, busy_ns;
        uint64_t used_on[MOST_DEVICES];
    } processes[MOST_PROCESSES];
    struct {
        uint64_t pid, at, begins, ends, device, kernel;
    } log[LOG];
};

/* A kernel's handle is its length in microseconds, where it is smaller than this; a collective adds its number and is finished
 * when it was launched on two devices. */
#define COLLECTIVE (1ull << 40)
/* The one kernel that a module of the software GPU has: its first argument is how long it runs, in nanoseconds. */
#define SPIN ((void *)(COLLECTIVE - 1))

extern struct state *state;
uint64_t sd_bytes(int device);
int sd_memory(int device, size_t *free_bytes, size_t *bytes);
int sd_is_dead(int slot);
int sd_take(uint64_t bytes, int device);
void sd_give(uint64_t bytes, int device);
int sd_allocate(uint64_t bytes, uint64_t *key);
/* blocks.c: small allocations */
int sd_is_small(uint64_t bytes);
int sd_block_allocate(uint64_t bytes, int device, uint64_t *key);
int sd_block_free(uint64_t key);
int sd_in_block(uint64_t key);
void sd_blocks_free_all(void);
int sd_free(uint64_t key);
uint64_t sd_size(uint64_t key);
void sd_free_all(int with_handles);
int sd_pool_allocate(uint64_t pool, uint64_t bytes, uint64_t *key);
int sd_pool_free(uint64_t key);
uint64_t sd_pool_reserved(uint64_t pool);
uint64_t sd_pool_used(uint64_t pool);
int sd_pool_trim(uint64_t pool, uint64_t keep);
int sd_pool_threshold(uint64_t pool, uint64_t bytes);
uint64_t sd_pool_create(int on_device, int device);
uint64_t sd_default_pool(int device);
int sd_pool_destroy(uint64_t pool);
int sd_is_pooled(uint64_t key);
int sd_handle_create(uint64_t bytes, uint64_t *handle);
int sd_handle_release(uint64_t handle);
int sd_handle_share(uint64_t handle);
int sd_map(uint64_t address, uint64_t bytes, uint64_t handle);
int sd_unmap(uint64_t address, uint64_t bytes);
int sd_retain(uint64_t address, uint64_t *handle);
uint64_t sd_graph(void);
int sd_graph_node(uint64_t graph, uint64_t bytes, uint64_t *key);
int sd_graph_launch(uint64_t exec);
uint64_t sd_graph_instantiate(uint64_t graph);
int sd_graph_trim(void);
uint64_t sd_graph_reserved(void);
/* work.c: devices, contexts, streams, capture, events and launches */
int sd_devices(void);
int sd_physical(int ordinal);
int sd_device(void); /* current */
int sd_set_device(int ordinal);
uint64_t sd_context(void);
uint64_t sd_primary(int ordinal);
uint64_t sd_context_make(int ordinal);
int sd_context_end(uint64_t context);
int sd_context_push(uint64_t context);
uint64_t sd_context_pop(void);
int sd_context_set(uint64_t context);
int sd_context_device(uint64_t context);
void *sd_stream(unsigned flags);
int sd_stream_destroy(void *stream);
int sd_stream_flags(void *stream, unsigned *flags);
int sd_stream_device(void *stream); /* physical */
uint64_t sd_stream_context(void *stream);
int sd_stream_query(void *stream);
int sd_stream_synchronise(void *stream);
int sd_stream_wait(void *stream, void *event);
int sd_capture_begin(void *stream, uint64_t graph);
int sd_capture_end(void *stream, uint64_t *graph);
int sd_capturing(void *stream, uint64_t *graph);
void *sd_function(const char *name);
const void *sd_kernel(void *function, void **arguments);
int sd_launch(void *stream, const void *kernel);
int sd_synchronise(void);
void *sd_event(void);
int sd_event_destroy(void *event);
int sd_event_record(void *event, void *stream);
int sd_event_query(void *event);
int sd_event_wait(void *event);
float sd_event_elapsed(void *from, void *to);
void sd_pools_synchronise(void);
int sd_claim_slot(void); /* of this process */
uint64_t sd_now(void);
void sd_pause(uint64_t ns);
int sd_stream_allocate(void *stream, uint64_t pool, uint64_t bytes, uint64_t *key);
int sd_stream_free(void *stream, uint64_t key);
int sd_limit(int limit, uint64_t value);
#define DEFAULT_POOL (~0ull)

#define API __attribute__((visibility("default")))

#endif
