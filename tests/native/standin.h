/* A driver that is not there: it counts memory for all processes, runs kernels on a clock, and misbehaves when told to. */
#ifndef STANDIN_H
#define STANDIN_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NOT_READY = 600, MOST_PROCESSES = 64, LOG = 8192 };

/* Shared by all processes; tests read it. Mirrored in tests/native/standin.py. */
struct state {
    uint64_t device_bytes, used, peak;
    uint64_t kernel_ns;  /* how long a kernel takes */
    uint64_t call_ns;    /* how long every allocation takes, to widen races */
    uint64_t fail_after; /* allocations after this many fail, once each; 0: none */
    uint64_t allocations, frees, launches;
    uint64_t free_at; /* the device's one queue */
    uint64_t pool_grain;
    uint64_t context_bytes; /* what the first context of a process takes */
    struct {
        uint64_t pid, used;
    } processes[MOST_PROCESSES];
    struct {
        uint64_t pid, at, begins, ends;
    } log[LOG];
};

extern struct state *state;
int sd_allocate(uint64_t bytes, uint64_t *key);
int sd_free(uint64_t key);
uint64_t sd_size(uint64_t key);
void sd_free_all(int with_handles);
int sd_pool_allocate(uint64_t pool, uint64_t bytes, uint64_t *key);
int sd_pool_free(uint64_t key);
uint64_t sd_pool_reserved(uint64_t pool);
uint64_t sd_pool_used(uint64_t pool);
int sd_pool_trim(uint64_t pool, uint64_t keep);
int sd_pool_threshold(uint64_t pool, uint64_t bytes);
uint64_t sd_pool_create(void);
int sd_pool_destroy(uint64_t pool);
int sd_is_pooled(uint64_t key);
int sd_handle_create(uint64_t bytes, uint64_t *handle);
int sd_handle_release(uint64_t handle);
int sd_map(uint64_t address, uint64_t bytes, uint64_t handle);
int sd_unmap(uint64_t address, uint64_t bytes);
int sd_retain(uint64_t address, uint64_t *handle);
uint64_t sd_graph(void);
int sd_graph_node(uint64_t graph, uint64_t bytes, uint64_t *key);
int sd_graph_launch(uint64_t exec);
uint64_t sd_graph_instantiate(uint64_t graph);
int sd_graph_trim(void);
uint64_t sd_graph_reserved(void);
int sd_launch(void *stream);
int sd_synchronise(void);
int sd_event_record(void *event);
int sd_event_query(void *event);
int sd_event_wait(void *event);
void *sd_event(void);
float sd_event_elapsed(void *from, void *to);
extern __thread int sd_capturing; /* every stream of the thread */
extern __thread uint64_t sd_captured_graph;

#define API __attribute__((visibility("default")))

#endif
