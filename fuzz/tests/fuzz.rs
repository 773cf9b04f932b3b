//! A bounded run of the guest's fuzzer from fixed seeds: the only test of this process, for it counts descriptors.
//!
//! `MILLRACE_FUZZ_SEED=n` runs that seed alone; `MILLRACE_FUZZ_COUNT=n` runs as many.

use millrace_fuzz::{report, try_seed};

/// Sequences of a normal run.
const COUNT: u64 = 1500;

#[test]
fn guests_do_what_they_like() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let seed = number("MILLRACE_FUZZ_SEED");
    let count = number("MILLRACE_FUZZ_COUNT").unwrap_or(if seed.is_some() { 1 } else { COUNT });
    let first = seed.unwrap_or(1);
    let mut completions = 0;
    for seed in first..first + count {
        match try_seed(seed) {
            Ok(more) => completions += more,
            Err(failure) => panic!("{}", report(seed, &failure)),
        }
    }
    assert!(completions > 20 * count, "only {completions} commands completed: the guest does not do much");
}
