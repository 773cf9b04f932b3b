//! The decisions of a token bucket, for software and hardware alike: when tokens may be taken, what is left then, and what of a bucket's
//! tokens shards may keep at hand.
//!
//! A bucket's state is one number: when it will have filled again what was taken. What it holds is the time since then at its rate,
//! a burst at most; when that lies ahead it owes.

/// How fast a bucket fills, and how much it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Rate {
    /// Tokens per second; not 0.
    pub per_second: u64,
    /// What it holds: the tokens of so many nanoseconds.
    pub burst_ns: u64,
}

/// How a bucket is divided: a part that shards may keep at hand, and the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Division {
    /// Tokens that a shard may have at hand; 0: the bucket is too small for that.
    pub lease: u64,
    /// The bucket without what all shards may have at hand.
    pub rest: Rate,
}

const SECOND: u64 = 1_000_000_000;
/// Leases of a shard per second at the full rate, as far as the bucket allows.
const LEASES: u64 = 1000;

fn saturate(wide: u128) -> u64 {
    u64::try_from(wide).unwrap_or(u64::MAX)
}

/// Nanoseconds in which so many tokens flow in, rounded up.
pub(crate) fn time_of(tokens: u64, per_second: u64) -> u64 {
    // Most products fit in one word, whose division is much faster.
    match tokens.checked_mul(SECOND) {
        Some(product) => product.div_ceil(per_second),
        None => saturate((u128::from(tokens) * u128::from(SECOND)).div_ceil(u128::from(per_second))),
    }
}

/// Tokens that flow in in so many nanoseconds, rounded down.
pub(crate) fn tokens_of(time: u64, per_second: u64) -> u64 {
    match time.checked_mul(per_second) {
        Some(product) => product / SECOND,
        None => saturate(u128::from(time) * u128::from(per_second) / u128::from(SECOND)),
    }
}

/// Divides a bucket: half of it is for leases of so many shards, as far as the largest request leaves room beside itself. So leases and
/// a request together are never more than the bucket, or than the request if that is more.
pub(crate) fn divide(rate: Rate, shards: u64, largest: u64) -> Division {
    let all = tokens_of(rate.burst_ns, rate.per_second);
    let leased = (all / 2).min(all.saturating_sub(largest));
    let lease = (leased / shards.max(1)).min(rate.per_second / LEASES);
    let leased = time_of(lease.saturating_mul(shards), rate.per_second);
    Division { lease, rest: Rate { burst_ns: rate.burst_ns.saturating_sub(leased), ..rate } }
}

/// How long it is until tokens may be taken; 0: now. More tokens than the bucket holds may be taken when it is full. `kept` tokens stay
/// behind, for those whose turn is earlier. Where there is no room for all it is never now: then the answer is when it will be, if
/// they take their own as soon as they can.
pub(crate) fn wait(filled: u64, now: u64, tokens: u64, kept: u64, rate: Rate) -> u64 {
    let need = time_of(tokens, rate.per_second).min(rate.burst_ns);
    let kept = time_of(kept, rate.per_second);
    let both = need.saturating_add(kept);
    let wait = filled.saturating_add(both).saturating_sub(now);
    if kept > 0 && both > rate.burst_ns { wait.max(1) } else { wait }
}

/// Takes tokens; the bucket's state from then on. What it does not hold, it owes.
pub(crate) fn take(filled: u64, now: u64, tokens: u64, rate: Rate) -> u64 {
    // A full bucket does not fill further.
    filled.max(now.saturating_sub(rate.burst_ns)).saturating_add(time_of(tokens, rate.per_second))
}

/// Tokens that it holds.
pub(crate) fn held(filled: u64, now: u64, rate: Rate) -> u64 {
    tokens_of(now.saturating_sub(filled).min(rate.burst_ns), rate.per_second)
}

/// The state of a bucket whose rate changes: what it holds or owes stays the same number of tokens, parts of a token counted. No change
/// forgives any debt, or gives anything.
pub(crate) fn changed(filled: u64, now: u64, old: Rate, new: Rate) -> u64 {
    let (old_rate, new_rate) = (u128::from(old.per_second), u128::from(new.per_second));
    if filled > now {
        return now.saturating_add(saturate((u128::from(filled - now) * old_rate).div_ceil(new_rate)));
    }
    let held = u128::from((now - filled).min(old.burst_ns));
    now.saturating_sub(saturate(held * old_rate / new_rate).min(new.burst_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn one_a_second_is_one_a_second() {
        let rate = Rate { per_second: 1, burst_ns: MS };
        assert_eq!(wait(0, 5_000 * MS, 1, 0, rate), 0);
        let filled = take(0, 5_000 * MS, 1, rate);
        assert_eq!(wait(filled, 5_001 * MS, 1, 0, rate), 999 * MS);
        let filled = take(filled, 6_000 * MS, 1, rate);
        assert_eq!(wait(filled, 6_000 * MS, 1, 0, rate), 1_000 * MS, "nothing is lost, nothing gained");
    }

    #[test]
    fn a_request_larger_than_the_bucket_goes_when_it_is_full() {
        let rate = Rate { per_second: 1_000_000, burst_ns: 10 * MS };
        let now = 100 * MS;
        let filled = take(0, now, 1, rate);
        assert_eq!(wait(filled, now, 50_000, 0, rate), 1000);
        let filled = take(filled, now + 1000, 50_000, rate);
        assert_eq!(wait(filled, now + 1000, 1, 0, rate), 40 * MS + 1000, "those behind it wait the longer");
        assert_eq!(held(filled, now + 1000, rate), 0);
    }

    #[test]
    fn what_is_kept_for_another_one_is_not_taken() {
        let rate = Rate { per_second: 1000, burst_ns: 10 * MS };
        let filled = take(0, 100 * MS, 8, rate);
        assert_eq!(wait(filled, 100 * MS, 2, 0, rate), 0);
        assert_eq!(wait(filled, 100 * MS, 1, 2, rate), MS);
        assert_eq!(wait(filled, 100 * MS, 1, 9, rate), 8 * MS);
        // All of it is kept: when the other one has gone.
        assert_eq!(wait(filled, 100 * MS, 1, 10, rate), 9 * MS);
        assert_eq!(wait(filled, 109 * MS, 1, 10, rate), 1, "it is late");
        assert_eq!(wait(filled, 109 * MS, 1, 99, rate), 89 * MS);
    }

    #[test]
    fn shards_have_half_of_the_bucket_at_hand_at_most() {
        for per_second in [1, 999, 12_345, 1 << 20, 1 << 40] {
            for burst_ns in [0, 1, MS, 10 * MS, 3_600_000 * MS] {
                for shards in [1, 2, 7, 64] {
                    let rate = Rate { per_second, burst_ns };
                    let Division { lease, rest } = divide(rate, shards, 1);
                    let (all, left) = (tokens_of(burst_ns, per_second), tokens_of(rest.burst_ns, per_second));
                    assert!(lease * shards + left <= all && lease * shards <= all / 2, "{rate:?} {shards}");
                    assert!(lease <= per_second / 1000);
                    assert!(lease > 0 || rest == rate);
                    assert_eq!(divide(rate, shards, all).lease, 0, "beside such a request there is no room");
                }
            }
        }
    }

    #[test]
    fn another_rate_changes_no_tokens() {
        let (slow, fast) = (Rate { per_second: 10, burst_ns: 1000 * MS }, Rate { per_second: 1000, burst_ns: 10 * MS });
        let now = 9_000 * MS;
        // Five owed: half a second at the slow rate, five milliseconds at the fast one, and back.
        let owing = changed(now + 500 * MS, now, slow, fast);
        assert_eq!(owing, now + 5 * MS);
        assert_eq!(changed(owing, now, fast, slow), now + 500 * MS);
        // Eight held.
        let holding = changed(now - 800 * MS, now, slow, fast);
        assert_eq!(held(holding, now, fast), 8);
        // A smaller bucket holds no more than it can.
        assert_eq!(held(changed(0, now, slow, Rate { burst_ns: 2 * MS, ..fast }), now, fast), 2);
    }

    #[test]
    fn the_same_rate_set_again_and_again_changes_nothing() {
        let rate = Rate { per_second: 1, burst_ns: 10 * MS };
        let now = 9_000 * MS;
        assert_eq!(changed(now + 990 * MS, now, rate, rate), now + 990 * MS);
        assert_eq!(changed(now - 7 * MS, now, rate, rate), now - 7 * MS);
        // What is owed is not forgiven, and what is held is not more, however the two divide.
        let odd = Rate { per_second: 7, ..rate };
        assert_eq!(changed(now + 1, now, rate, odd), now + 1);
        assert_eq!(changed(now - 8, now, rate, odd), now - 1);
        let (mut filled, mut went) = (0, 0);
        for time in (now..now + 10_000 * MS).step_by(MS as usize) {
            if (time - now).is_multiple_of(50 * MS) {
                filled = changed(filled, time, rate, rate);
            }
            if wait(filled, time, 1, 0, rate) == 0 {
                filled = take(filled, time, 1, rate);
                went += 1;
            }
        }
        assert!((10..=11).contains(&went), "{went} in ten seconds at one a second");
    }

    #[test]
    fn times_do_not_overflow() {
        for tokens in [0, 1, 1 << 20, u64::MAX] {
            for per_second in [1, 3, 1 << 34, u64::MAX] {
                let rate = Rate { per_second, burst_ns: u64::MAX };
                assert!(tokens > 0 || time_of(tokens, per_second) == 0);
                take(u64::MAX - 1, u64::MAX, tokens, rate);
                wait(u64::MAX - 1, u64::MAX, tokens, tokens, rate);
                changed(tokens, 1 << 20, rate, Rate { per_second: 7, burst_ns: tokens });
                divide(rate, tokens, tokens);
            }
        }
        assert_eq!(time_of(3_000_000, 3_000_000), 1_000_000_000);
        assert_eq!((time_of(1, 3), tokens_of(333_333_334, 3)), (333_333_334, 1));
    }
}
