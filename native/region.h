/* The shared-memory region of one Device: what every process of every tenant, the gateway and the controller agree on.
 *
 * The layout is versioned: a library and a controller of different versions refuse each other instead of guessing. Every
 * field is naturally aligned and little-endian. Spare ones are 0; one that is given a meaning in which 0 changes nothing
 * needs no new version: processes that do not know it yet may go on beside those that do. src/aimgpu/isolation/layout.py mirrors this file, and a test compares them.
 *
 * Who writes what: the controller writes names, caps, ranks and limits; a process writes only its own slot and the
 * counters of its tenant; whoever sends signals has a writer cell of its own.
 */
#ifndef AIM_REGION_H
#define AIM_REGION_H

#include <stdint.h>

#define AIM_MAGIC 0x31525550474d4941ULL /* "AIMGPUR1" */
#define AIM_VERSION 1u
#define AIM_TENANTS 64u
#define AIM_PROCESSES 32u
#define AIM_WRITERS 4u
#define AIM_NAME 64u

enum { AIM_FREE = 0, AIM_ACTIVE = 1 };

/* One process of a tenant. `used_bytes` is written by that process alone: a killed one leaves it for the reaper. */
struct aim_process {
    uint32_t state;
    uint32_t pid;         /* in its own pid namespace */
    uint64_t start_ticks; /* field 22 of /proc/PID/stat: pids are reused, start times are not */
    uint64_t pid_namespace;
    uint64_t used_bytes;
    uint64_t context_bytes; /* what its driver context costs beside its allocations; raised by the controller when measured */
    uint64_t attached_ns;
    uint64_t spare0[2];
    /* the second cache line is written at every launch */
    uint64_t launched; /* launches so far */
    uint64_t done;     /* launches known to be finished */
    uint64_t launch_ns;
    uint64_t done_ns;
    uint64_t waiting;  /* threads that wait for the device now */
    uint64_t asked_ns; /* when one last asked whether it is done */
    uint64_t flight_until_ns; /* gated: when what it has in flight ends, as it reckons */
    uint64_t crew_wait_ns;    /* waits for the other processes of its tenant since */
};

/* Whoever knows that a request runs says so here. One cell a writer, so that no lock is needed. */
struct aim_writer {
    uint32_t pid;
    uint32_t pad;
    uint64_t start_ticks;
    uint64_t running;  /* requests in flight */
    uint64_t begun_ns; /* when the last one began */
    uint64_t ended_ns; /* when `running` last fell to 0 */
    uint64_t spare[3];
};

struct aim_tenant {
    uint32_t state;
    uint32_t rank; /* 2 critical, 1 between, 0 best effort: a lower one goes into the gaps of a higher one */
    uint64_t epoch; /* changes when the slot gets another owner */
    char name[AIM_NAME];
    uint64_t cap_bytes;
    uint64_t context_bytes; /* charged once for each process that attaches */
    uint64_t rounding_bytes; /* allocations above half of it are charged in multiples of it */
    uint32_t compute_ppm;    /* 1000000: no limit */
    uint32_t process_high;   /* slots at or above this were never used */
    uint64_t used_bytes;     /* sum over the processes when it was last taken */
    uint64_t peak_bytes;
    uint64_t denied; /* allocations refused at the cap */
    uint64_t spare0[7];
    /* the gate */
    uint64_t quiet_ns;      /* how long the tenant must be idle before others use the gap */
    uint64_t paid_until_ns; /* compute share: launches wait until then */
    uint64_t gpu_ns;        /* device time of measured work */
    uint64_t wait_since_ns; /* waits for the turn since */
    uint64_t waited_ns;
    uint64_t overruns; /* launches let through at a bound */
    uint64_t batches;
    uint64_t crew; /* process index + 1: the one that may have work in flight; 0: nobody's */
    uint64_t crew_since_ns;
    uint64_t yield_ppm;     /* device time that lower tenants may use while this one works; 0: none, see yield.c */
    uint64_t yield_paid_ns; /* they have used their share up to then */
    uint64_t spare1[5];
    struct aim_writer writers[AIM_WRITERS];
    struct aim_process processes[AIM_PROCESSES];
};

struct aim_header {
    uint64_t magic;
    uint32_t version;
    uint32_t header_bytes;
    uint64_t region_bytes;
    uint32_t tenants;
    uint32_t processes;
    uint32_t tenant_bytes;
    uint32_t process_bytes;
    uint64_t boot; /* hash of the boot id: times count from a boot */
    uint64_t device_bytes;
    char device[AIM_NAME]; /* UUID, to recognise it in NVML; empty: any */
    uint32_t tenant_high;  /* slots at or above this were never used */
    uint32_t pad;
    uint64_t spare0[7];
    /* steered: bounds and targets, nanoseconds */
    uint64_t hang_ns;    /* a critical tenant without a sign of life for so long stops nobody */
    uint64_t starve_ns;  /* a gated launch waits for others no longer than this */
    uint64_t room_ns;    /* nor for its own earlier work than this */
    uint64_t quiet_min_ns;
    uint64_t quiet_max_ns;
    uint64_t quantum_ns; /* a turn, while others wait */
    uint64_t batch_ns;   /* work that a gated tenant may have in flight; one launch always may be */
    uint64_t lead_ns;    /* its end is looked for this long before it is due */
    uint64_t unwaited_ns; /* work that nobody waits for is taken to be done this long after the last launch */
    uint64_t spare1[7];
    /* the turn */
    uint64_t turn; /* tenant index + 1; 0: nobody's */
    uint64_t turn_until_ns;
    uint64_t turn_since_ns;
    uint32_t wake; /* futex: bumped by whatever may let a waiter go on */
    uint32_t waiters;
    uint64_t gap_ns; /* typical length of a best-effort batch, as measured */
    uint64_t spare2[468];
};

struct aim_region {
    struct aim_header header;
    struct aim_tenant tenants[AIM_TENANTS];
};

_Static_assert(sizeof(struct aim_process) == 128, "two cache lines");
_Static_assert(sizeof(struct aim_writer) == 64, "one cache line");
_Static_assert(sizeof(struct aim_header) == 4096, "one page");
_Static_assert(sizeof(struct aim_tenant) % 64 == 0, "whole cache lines");

#endif
