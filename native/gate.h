/* The parts of the gate: which tenants have work (activity.c), whether a launch fits into a pause (lookahead.c), whose turn it
 * is (tenant_turn.c), which process of a tenant may launch (process_turn.c), how much is in flight (inflight.c), the compute
 * ceiling (compute.c), and tenants on several GPUs (window.c). What is finished is known from sync.c and streams.c. */
#ifndef AIM_GATE_H
#define AIM_GATE_H

#include "aim.h"

/* One launch on its way through the gate. */
struct aim_launch {
    const struct aim_driver *driver;
    struct aim_share *share;
    struct aim_process *slot;
    void *stream;
    struct aim_key key;
    uint64_t expected_ns; /* learned length, or, where it is not known, the longest recent one of the process; 0: none */
    unsigned most;        /* how many like it may be in flight together; 1: it goes alone */
    int known;            /* the length was learned from launches of this function */
    int varies;           /* and is not the same each time */
    int forced;           /* it passes at a bound, beside the work of others */
    uint64_t batch;       /* serial of the batch that it was counted in; 0: none */
    uint64_t joined_ns;
    uint64_t entered_ns;
    int device;
    int overdrawn; /* it found the share overdrawn */
    int yielded; /* it passes beside work of a higher tenant that yields a share */
    int queues;  /* it may be queued behind earlier work, so it is counted with it */
    int follows; /* a peer on another GPU may wait for it: nothing else holds it back */
};

/* Each returns `now` if the launch may continue, else the time to look again. */
uint64_t aim_higher_idle_at(const struct aim_share *share, struct aim_launch *launch, uint64_t now);
uint64_t aim_lookahead_at(const struct aim_share *share, uint64_t length, uint64_t now);
uint64_t aim_tenant_turn_at(struct aim_share *share, uint64_t now, int in_flight);
uint64_t aim_room_at(const struct aim_launch *launch, uint64_t now);
uint64_t aim_compute_at(const struct aim_share *share, uint64_t now);
uint64_t aim_process_turn_at(struct aim_share *share, struct aim_process *slot, uint64_t now, uint64_t until, int in_flight);

/* activity.c */
int aim_higher_present(const struct aim_share *share);
uint64_t aim_tenant_idle_at(const struct aim_header *header, const struct aim_tenant *tenant, uint64_t now);
int aim_tenant_device_idle(const struct aim_tenant *tenant, uint64_t *since);
uint64_t aim_tenant_idle_since(const struct aim_tenant *tenant);
uint64_t aim_tenant_last_sign(const struct aim_tenant *tenant);
int aim_tenant_is_preparing(const struct aim_tenant *tenant);
uint64_t aim_tenant_requests(const struct aim_tenant *tenant);
uint64_t aim_tenant_request_ns(const struct aim_tenant *tenant);
uint64_t aim_tenant_begun_ns(const struct aim_tenant *tenant);
int aim_tenant_has_signals(const struct aim_tenant *tenant);
unsigned aim_pause_bucket(uint64_t pause);
uint64_t aim_pause_upper(unsigned bucket);

/* yield.c */
int aim_yields_all(const struct aim_tenant *tenant);
int aim_higher_all_yield(const struct aim_share *share);
int aim_higher_allow_queue(const struct aim_share *share, uint64_t now);
int aim_yields_now(const struct aim_share *share, uint64_t now);
int aim_yield_bounds_room(const struct aim_share *share);
uint64_t aim_yield_at(const struct aim_header *header, const struct aim_tenant *tenant, struct aim_launch *launch,
                      uint64_t idle, uint64_t now);
void aim_yield_admitted(const struct aim_launch *launch, uint64_t now);

/* lookahead.c */
struct aim_admission { /* requests of the higher tenants when a long launch was admitted */
    uint32_t index[4];
    uint64_t requests[4];
    unsigned count;
};
int aim_lookahead_is_long(const struct aim_share *share, uint64_t length);
uint64_t aim_lookahead_bound(const struct aim_share *share, uint64_t length);
void aim_lookahead_admit(const struct aim_share *share, uint64_t length, uint64_t now, struct aim_admission *admission);
void aim_lookahead_finished(const struct aim_share *share, const struct aim_admission *admission, uint64_t ended);

/* lengths.c: learned lengths of launches */
struct aim_expected {
    uint64_t ns;
    unsigned most;
    int known, varies;
};
struct aim_measured { /* a batch */
    uint64_t ns, expected_ns, call_ns; /* call_ns: how long the driver's calls took */
    unsigned launches, keys; /* keys: of different launches */
    int beside; /* a higher tenant worked meanwhile */
};
struct aim_expected aim_length_of(const struct aim_key *key);
void aim_length_measured(const struct aim_key *key, const struct aim_measured *took);

/* tenant_turn.c, process_turn.c */
void aim_tenant_turn_defer(struct aim_share *share, uint64_t now);
void aim_tenant_turn_keep(struct aim_share *share, uint64_t until);
void aim_wake(struct aim_region *region);
int aim_process_turn_busy(const struct aim_share *share, const struct aim_process *slot, uint64_t now);

/* inflight.c; the functions that take a launch are called with the mutex of its device held */
void aim_inflight_lock(int device);
void aim_inflight_unlock(int device);
void aim_inflight_expect(struct aim_launch *launch);
int aim_inflight_any(int device);
int aim_inflight_seen(int device); /* the same, without the mutex */
int aim_inflight_is_short(const struct aim_launch *launch, uint64_t now);
int aim_inflight_has_slot(int device);
uint64_t aim_inflight_end(const struct aim_launch *launch, uint64_t now, int with_launch);
int aim_inflight_stalled(const struct aim_launch *launch, uint64_t since, uint64_t now);
void aim_inflight_join(struct aim_launch *launch, uint64_t now);
uint64_t aim_inflight_launched(struct aim_launch *launch); /* the time at which the driver took it */
void aim_inflight_collect(const struct aim_driver *driver, int device, struct aim_share *share);
void aim_inflight_stream_ends(const struct aim_driver *driver, void *stream);
void aim_inflight_context_ends(uint64_t context);
void aim_inflight_reset(int device);

/* compute.c */
int aim_compute_is_limited(const struct aim_share *share);
int aim_compute_pay(struct aim_share *share, uint64_t expected, uint64_t now);
void aim_compute_correct(struct aim_share *share, uint64_t expected, uint64_t spent, uint64_t now);

/* window.c */
int aim_window_is_shared(void); /* this tenant has several GPUs */
uint64_t aim_window_at(const struct aim_launch *launch, uint64_t now);
int aim_window_must_follow(const struct aim_launch *launch, uint64_t now);
void aim_window_launched(const struct aim_launch *launch);

/* Capture elsewhere in the process must not see our events. */
#define RELAXED(driver, call)                                                                                          \
    ({                                                                                                                 \
        int mode_ = (driver)->relax(2);                                                                                \
        __typeof__(call) code_ = (call);                                                                               \
        (driver)->relax(mode_);                                                                                        \
        code_;                                                                                                         \
    })

#endif
