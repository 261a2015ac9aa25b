/* The compute ceiling: device time of a tenant, all its processes together, at most a share of the time that passes.
 *
 * A launch pays its expected device time before it starts, so that processes that launch at once cannot all pass, and the
 * difference to the measured time afterwards. The tenant's word in the region is the time up to which it has paid: microseconds
 * since boot in 48 bits, and a checksum in 16, so that a debt of hours is trusted and a corrupted word is not. */
#include "gate.h"

enum { WINDOW_US = 100000, LEAST_PPM = 100 };
#define FULL_PPM 1000000u
#define MOST_DEBT_US (24ull * 3600 * 1000000)
#define TIME_BITS 48
#define TIME_MASK ((1ull << TIME_BITS) - 1)

static uint64_t seal(uint64_t microseconds)
{
    uint64_t time = microseconds & TIME_MASK, mixed = (time ^ 0x5bd1e995u) * 0x9e3779b97f4a7c15u;
    return time | (mixed >> TIME_BITS << TIME_BITS);
}

/* The time up to which is paid; 0 for a word that does not carry its checksum, or that lies too far ahead. */
static uint64_t paid_until(uint64_t word, uint64_t now_us)
{
    uint64_t time = word & TIME_MASK;
    return seal(time) == word && time < now_us + MOST_DEBT_US + WINDOW_US ? time : 0;
}

static uint64_t share_ppm(const struct aim_share *share)
{
    uint64_t ppm = load(&share->tenant->compute_ppm);
    return ppm == 0 || ppm >= FULL_PPM ? FULL_PPM : ppm < LEAST_PPM ? LEAST_PPM : ppm;
}

static uint64_t cost_us(const struct aim_share *share, uint64_t nanoseconds)
{
    uint64_t most = MOST_DEBT_US / FULL_PPM * share_ppm(share) * 1000; /* beyond it the product below could overflow */
    return (nanoseconds < most ? nanoseconds : most) / 1000 * FULL_PPM / share_ppm(share);
}

int aim_compute_is_limited(const struct aim_share *share) { return share_ppm(share) < FULL_PPM; }

uint64_t aim_compute_at(const struct aim_share *share, uint64_t now)
{
    if (!aim_compute_is_limited(share))
        return now;
    uint64_t paid = paid_until(load(&share->tenant->paid), now / 1000);
    return paid > now / 1000 ? paid * 1000 + 1000 : now;
}

/* 0: another process paid in the meantime, and the launch has to wait. */
int aim_compute_pay(struct aim_share *share, uint64_t expected, uint64_t now)
{
    uint64_t old = load(&share->tenant->paid), now_us = now / 1000, paid;
    if (!aim_compute_is_limited(share))
        return 1;
    do {
        paid = paid_until(old, now_us);
        if (paid > now_us)
            return 0;
        if (paid + WINDOW_US < now_us)
            paid = now_us - WINDOW_US; /* unused time is kept for one window */
        paid += cost_us(share, expected);
    } while (!__atomic_compare_exchange_n(&share->tenant->paid, &old, seal(paid), 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return 1;
}

void aim_compute_correct(struct aim_share *share, uint64_t expected, uint64_t spent, uint64_t now)
{
    uint64_t old = load(&share->tenant->paid), now_us = now / 1000, paid;
    add(&share->tenant->gpu_ns, spent);
    add(&share->tenant->batches, 1);
    if (!aim_compute_is_limited(share) || spent == expected)
        return;
    do {
        paid = paid_until(old, now_us);
        if (paid + WINDOW_US < now_us)
            paid = now_us - WINDOW_US;
        if (spent > expected)
            paid += cost_us(share, spent - expected);
        else
            paid -= cost_us(share, expected - spent) < paid ? cost_us(share, expected - spent) : paid;
        if (paid > now_us + MOST_DEBT_US)
            paid = now_us + MOST_DEBT_US;
    } while (!__atomic_compare_exchange_n(&share->tenant->paid, &old, seal(paid), 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}
