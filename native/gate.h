/* The gate's parts: who has work (activity.c), whose turn it is (tenant_turn.c), which process of a tenant goes (process_turn.c), how much is
 * in flight (inflight.c). */
#ifndef AIM_GATE_H
#define AIM_GATE_H

#include "aim.h"

/* Each answers `now` when the launch may go on, else the time at which to look again. */
uint64_t aim_higher_idle_at(const struct aim_share *share, uint64_t now);
uint64_t aim_tenant_turn_at(struct aim_share *share, uint64_t now, int in_flight);
uint64_t aim_room_at(const struct aim_driver *driver, int device, struct aim_share *share, void *stream, uint64_t now);
uint64_t aim_paid_at(const struct aim_share *share, uint64_t now);
uint64_t aim_process_turn_at(struct aim_share *share, struct aim_process *slot, uint64_t now, uint64_t until, int in_flight);

int aim_higher_present(const struct aim_share *share);
int aim_yields_all(const struct aim_tenant *tenant);
uint64_t aim_yield_at(const struct aim_tenant *tenant, uint64_t idle, uint64_t now);
void aim_yield_charge(struct aim_share *share, uint64_t spent, uint64_t now);
void aim_tenant_turn_defer(struct aim_share *share, uint64_t now);
void aim_tenant_turn_keep(struct aim_share *share, uint64_t until);
void aim_wake(struct aim_region *region);
int aim_inflight_any(int device);
int aim_process_turn_busy(const struct aim_share *share, const struct aim_process *slot, uint64_t now);
uint64_t aim_inflight_busy_until(int device);
uint64_t aim_inflight_end(int device, const struct aim_share *share, uint64_t now, int more); /* with so many launches more */
int aim_inflight_is_bound(int device, uint64_t now);
void aim_inflight_opened(const struct aim_driver *driver, int device, void *stream);
void aim_inflight_launched(const struct aim_driver *driver, int device, struct aim_share *share);
void aim_inflight_reset(int device);
void aim_inflight_unbound(int device, uint64_t until);

/* Capture elsewhere in the process must not see our events. */
#define RELAXED(driver, call)                                                                                          \
    ({                                                                                                                 \
        int mode_ = (driver)->relax(2);                                                                                \
        __typeof__(call) code_ = (call);                                                                               \
        (driver)->relax(mode_);                                                                                        \
        code_;                                                                                                         \
    })

#endif
