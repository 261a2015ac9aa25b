/* The shared-memory region of one partition: the state that the processes of all tenants, the gateway and the daemon share.
 *
 * The layout is versioned: a library and a daemon of different versions refuse each other's regions. Every field is naturally
 * aligned and little-endian. Spare fields are 0; a spare field that gets a meaning in which 0 changes nothing needs no new
 * version. src/aimgpu/isolation/layout.py mirrors this file, and a test compares them.
 *
 * Writers: the daemon writes names, caps, ranks and limits; a process writes its own slot and the counters of its tenant;
 * each sender of request signals has a cell of its own.
 *
 * Locks are open-file-description locks on single bytes of the file, so the kernel releases them with their holder:
 *   byte TENANT                                        the accounting of a tenant
 *   byte AIM_LIFE + TENANT * AIM_PROCESSES + SLOT      held by the process in that slot for as long as it lives
 *   byte AIM_SENDER_LIFE + TENANT * AIM_WRITERS + CELL held by the sender that uses that cell
 * Locks can be tested from any pid namespace and by any user that can open the file. */
#ifndef AIM_REGION_H
#define AIM_REGION_H

#include <stdint.h>

#define AIM_MAGIC 0x31525550474d4941ULL /* "AIMGPUR1" */
#define AIM_VERSION 3u
#define AIM_TENANTS 64u
#define AIM_PROCESSES 32u
#define AIM_WRITERS 4u
#define AIM_NAME 64u
#define AIM_PAUSES 48u
#define AIM_LIFE (1u << 20)
#define AIM_SENDER_LIFE (1u << 21)

enum { AIM_FREE = 0, AIM_ACTIVE = 1, AIM_CLAIMED = 2 };

/* One process of a tenant. `used_bytes` is written by that process alone; a killed process leaves it to be reaped. */
struct aim_process {
    uint32_t state;
    uint32_t pid;         /* in its own pid namespace */
    uint64_t start_ticks; /* field 22 of /proc/PID/stat: distinguishes processes that had the same pid */
    uint64_t pid_namespace;
    uint64_t used_bytes;
    uint64_t context_bytes; /* charge for its driver context; raised by it or the daemon when the driver reports more */
    uint64_t attached_ns;
    uint64_t measured_ns; /* when it last asked the driver itself; from then on the daemon only raises the charge; 0: never */
    uint64_t life_locked; /* 1: it holds its lock for life through its mapping, so that it is gone where the lock is free */
    /* second cache line: written at every launch */
    uint64_t launched; /* launches so far */
    uint64_t done;     /* launches known to be finished */
    uint64_t launch_ns;
    uint64_t done_ns;
    uint64_t waiting;           /* threads that wait for the device now */
    uint64_t asked_ns;          /* time of the last query or wait for completion */
    uint64_t inflight_until_ns; /* gated: expected end of its work in flight */
    uint64_t turn_wait_ns;      /* since when it waits for the other processes of its tenant; 0: it does not */
    /* third cache line */
    uint64_t bursts;   /* busy periods so far, each after the tenant was idle long enough for others to launch */
    uint64_t burst_ns; /* typical length of one */
    uint64_t burst_began_ns;
    uint64_t window; /* several GPUs: the launch window of its tenant that it last launched in */
    uint64_t window_launches;
    uint64_t spare1[3];
};

/* One sender of request signals (a gateway). One cell per sender, so that no lock is needed. */
struct aim_writer {
    uint32_t pid;
    uint32_t begun; /* requests begun while none ran, modulo 2^32 */
    uint64_t start_ticks;
    uint64_t running;    /* requests in flight */
    uint64_t begun_ns;   /* when the last one began */
    uint64_t ended_ns;   /* when `running` last fell to 0 */
    uint64_t request_ns; /* typical time from the first request's begin to `running` 0 */
    uint64_t pid_namespace;
    uint64_t spare;
};

struct aim_tenant {
    uint32_t state;
    uint32_t rank;  /* 2 critical, 1 between, 0 best effort: lower ranks launch into the gaps of higher ones */
    uint64_t epoch; /* changes when the slot gets another owner */
    char name[AIM_NAME];
    uint64_t cap_bytes;
    uint64_t context_bytes;  /* charged once for each process that attaches */
    uint64_t rounding_bytes; /* allocations above half of it are charged in multiples of it */
    uint32_t compute_ppm;    /* 1000000: no limit */
    uint32_t process_high;   /* slots at or above this were never used */
    uint64_t peak_bytes;
    uint64_t denied; /* allocations refused at the cap */
    uint64_t spare0[8];
    /* the gate */
    uint64_t quiet_ns; /* how long the tenant must be idle before others use the gap */
    uint64_t paid;     /* compute ceiling: launches wait until then; microseconds with a checksum, see compute.c */
    uint64_t gpu_ns;   /* device time of measured work */
    uint64_t wait_since_ns;
    uint64_t waited_ns;
    uint64_t overruns; /* launches admitted at a bound */
    uint64_t batches;
    uint64_t process_turn; /* process index + 1: the process that may have work in flight; 0: none */
    uint64_t process_turn_since_ns;
    uint64_t longest_launch_ns; /* longest launch that the gate delays on its own account, as learned */
    uint64_t held;              /* launches delayed because they would not fit into a pause of a higher tenant */
    uint64_t held_ns;
    uint64_t touched;   /* of this tenant's requests: those that began while a long launch of a lower tenant ran */
    uint64_t spent_ppm; /* of this tenant's allowance: expected touches of admitted launches, millionths */
    uint64_t window;    /* several GPUs: number of the launch window, odd while it is open */
    uint64_t yield_ppm;     /* device time that lower tenants may use while this one works; 0: none, see yield.c */
    uint64_t yield_paid_ns; /* they have used their share up to then */
    uint64_t yield_burst_ns; /* they may launch without a look at their share until then */
    uint64_t step_pause_ns;  /* typical time between the end of its work and its next launch, of those below 5 ms */
    uint64_t fill_until_ns;  /* launches of lower tenants that fill one of these pauses are expected to end then */
    uint64_t overrun_ns;     /* when a launch last passed at a bound */
    uint64_t spare1[3];
    uint32_t pauses[AIM_PAUSES]; /* histogram of the pauses between its busy periods, half octaves from 8 us */
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
    char device[AIM_NAME]; /* UUID of the GPU or partition; empty: matched by ordinal */
    uint32_t tenant_high;  /* slots at or above this were never used */
    uint32_t pad;
    uint64_t spare0[7];
    /* bounds and targets, nanoseconds where not stated otherwise */
    uint64_t hang_ns;   /* a critical tenant that shows no activity for this long delays no one */
    uint64_t starve_ns; /* the longest that a launch waits for other tenants */
    uint64_t room_ns;   /* the longest that a short launch waits for earlier work of its own tenant */
    uint64_t quiet_min_ns;
    uint64_t quiet_max_ns;
    uint64_t quantum_ns;    /* length of a turn while others wait */
    uint64_t batch_ns;      /* work that a gated tenant may have in flight; a single launch may be longer */
    uint64_t lead_ns;       /* completion is polled this long before it is due */
    uint64_t unwaited_ns;   /* work that no thread waits for counts as finished this long after the last launch */
    uint64_t allowance_ppm; /* requests of a higher tenant that long launches may delay, millionths */
    uint64_t long_ns;       /* launches up to this length are never held back for a pause that may be too short */
    uint64_t absent_ns;     /* a tenant without a request for this long holds no long launch back */
    uint64_t silence_ns;    /* behind a strict tenant without a sign for this long, work may be queued; 0: the default of yield.c */
    uint64_t spare1[3];
    /* the turn of the tenants */
    uint64_t turn; /* tenant index + 1; 0: none */
    uint64_t turn_until_ns;
    uint64_t turn_since_ns;
    uint32_t wake; /* futex: incremented by every event that may let a waiter continue */
    uint32_t waiters;
    uint64_t gap_ns; /* typical length of a best-effort batch, as measured */
    /* beside a tenant that yields a share, see yield.c; 0: the default of yield.c */
    uint64_t light_ns;       /* launches up to this length do not wait for a pause of the device */
    uint64_t overdraft_ns;   /* device time by which they may overdraw the share, beside one long launch */
    uint64_t pause_wait_ns;  /* the longest that a longer launch waits for one */
    uint64_t burst_ns;       /* after such a launch, others pass for so long */
    uint64_t yield_room_ns;  /* work in flight; 1: not bounded */
    uint64_t fill_ns;        /* what must be left of a typical pause after a launch that fills it; 1: pauses are not filled */
    uint64_t admitted[4];    /* launches beside a tenant that yields: in a pause, not in one, light, filling */
    uint32_t step_pauses[AIM_PAUSES]; /* histogram of `step_pause_ns`, half octaves from 8 us */
    uint32_t lengths[AIM_PAUSES];     /* histogram of the lengths of `admitted` */
    uint64_t spare2[410];
};

struct aim_region {
    struct aim_header header;
    struct aim_tenant tenants[AIM_TENANTS];
};

_Static_assert(sizeof(struct aim_process) == 192, "three cache lines");
_Static_assert(sizeof(struct aim_writer) == 64, "one cache line");
_Static_assert(sizeof(struct aim_header) == 4096, "one page");
_Static_assert(sizeof(struct aim_tenant) % 64 == 0, "whole cache lines");
_Static_assert(sizeof(struct aim_region) < AIM_LIFE, "lock bytes lie behind the data");

#endif
