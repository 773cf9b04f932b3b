//! The decision: how long a request waits. Small and pure, for software and hardware alike.

/// How fast a bucket fills, and how much it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Rate {
    /// Tokens per second; not 0.
    pub per_second: u64,
    /// What it holds: the tokens of so many nanoseconds.
    pub burst_ns: u64,
}

/// What a request gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Grant {
    /// When the bucket has filled again what was taken, in nanoseconds: its state from now on.
    pub filled: u64,
    /// When the request may go on: not after `now` if at once.
    pub start: u64,
}

const SECOND: u64 = 1_000_000_000;

/// Nanoseconds in which so many tokens flow in.
pub(crate) fn time_of(tokens: u64, per_second: u64) -> u64 {
    let whole = (tokens / per_second).saturating_mul(SECOND);
    // The rest is less than a second's tokens. Rates beyond 2^34 have to do with less exact fractions.
    let rest = tokens % per_second;
    let part = match rest.checked_mul(SECOND) {
        Some(product) => product / per_second,
        None => rest / (per_second / SECOND).max(1),
    };
    whole.saturating_add(part)
}

/// Takes tokens out of a bucket whose state is `filled`, at a time. They are always granted: a bucket may be owed to, and the next
/// request waits for what this one took. So requests go on in the order in which they came, whatever their sizes, and nobody starves.
pub(crate) fn take(filled: u64, now: u64, tokens: u64, rate: Rate) -> Grant {
    // A full bucket does not fill further.
    let start = filled.max(now.saturating_sub(rate.burst_ns));
    Grant { filled: start.saturating_add(time_of(tokens, rate.per_second)), start }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn over_any_time_no_more_than_the_rate_and_a_bucket() {
        let rate = Rate { per_second: 1000, burst_ns: 10 * MS };
        let (mut filled, mut now, mut granted) = (0, 1_000 * MS, Vec::new());
        for request in 0..5000_u64 {
            let grant = take(filled, now, 1 + request % 7, rate);
            filled = grant.filled;
            now = now.max(grant.start);
            granted.push((now, 1 + request % 7));
            if request % 100 == 0 {
                now += 50 * MS;
            }
        }
        for (at, (from, _)) in granted.iter().enumerate().step_by(97) {
            let mut tokens = 0;
            for (time, count) in &granted[at..] {
                tokens += count;
                // A request that has begun is let through whole.
                let allowed = (time - from) / MS + 10 + 7;
                assert!(tokens <= allowed, "{tokens} tokens in {} ms", (time - from) / MS);
            }
        }
    }

    #[test]
    fn one_a_second_is_one_a_second() {
        let rate = Rate { per_second: 1, burst_ns: MS };
        let first = take(0, 5_000 * MS, 1, rate);
        assert!(first.start <= 5_000 * MS);
        let second = take(first.filled, 5_001 * MS, 1, rate);
        assert_eq!(second.start, 5_999 * MS);
        assert_eq!(take(second.filled, 5_002 * MS, 1, rate).start, 6_999 * MS);
    }

    #[test]
    fn times_do_not_overflow() {
        for tokens in [0, 1, 1 << 20, u64::MAX] {
            for per_second in [1, 3, 1 << 34, u64::MAX] {
                let time = time_of(tokens, per_second);
                assert!(tokens > 0 || time == 0);
                take(u64::MAX - 1, u64::MAX, tokens, Rate { per_second, burst_ns: u64::MAX });
            }
        }
        assert_eq!(time_of(3_000_000, 3_000_000), SECOND);
        assert_eq!(time_of(1, 3), 333_333_333);
    }
}
