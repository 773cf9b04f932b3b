//! How much the random tests do, and from which seeds: what is usual, or what the environment says for a long run.

use std::{
    env::{self, VarError},
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

/// Times as many crash points, stacks and other random cases as usual.
const RUNS: &str = "MILLRACE_TEST_RUNS";
/// The first seed of every random test. They print theirs in hexadecimal when they fail.
const SEED: &str = "MILLRACE_TEST_SEED";
/// Times as many as usual at most: numbers of cases stay numbers.
const MOST_RUNS: u64 = 1_000_000;

/// Where seeds begin at most: others are made of them by adding to them.
const MOST_SEED: u64 = u64::MAX >> 1;

/// As `cut` of [`every_cut`]: the power stays.
pub const NO_CUT: u64 = u64::MAX;

/// What a variable says, if it is there.
fn number(
    name: &str,
    value: Result<String, VarError>,
    allowed: std::ops::RangeInclusive<u64>,
) -> Result<Option<u64>, String> {
    let value = match value {
        Err(VarError::NotPresent) => return Ok(None),
        Err(VarError::NotUnicode(value)) => value.to_string_lossy().into_owned(),
        Ok(value) => value,
    };
    let parsed = match value.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => value.parse(),
    };
    match parsed {
        Ok(number) if allowed.contains(&number) => Ok(Some(number)),
        _ => {
            let (least, most) = allowed.into_inner();
            Err(format!(
                "{name} is {value:?}: set it to a number from {least} to {most} (0x… is hexadecimal), or not at all"
            ))
        }
    }
}

fn variable(name: &str, allowed: std::ops::RangeInclusive<u64>) -> Option<u64> {
    number(name, env::var(name), allowed).unwrap_or_else(|wrong| panic!("{wrong}"))
}

/// How many cases a test tries that usually tries so many.
///
/// # Panics
/// When the environment says nonsense.
pub fn cases(usual: usize) -> usize {
    usual * variable(RUNS, 1..=MOST_RUNS).unwrap_or(1) as usize
}

/// The first seed of a test that usually begins with this one.
///
/// # Panics
/// When the environment says nonsense.
pub(super) fn first_seed(usual: u64) -> u64 {
    variable(SEED, 0..=MOST_SEED).unwrap_or(usual)
}

/// The seeds of a test that usually tries so many.
///
/// # Panics
/// When the environment says nonsense.
pub fn seeds(first: u64, usual: usize) -> Range<u64> {
    let first = first_seed(first);
    first..first + cases(usual) as u64
}

/// Calls `run` with a seed and the boundary at which the power goes: every boundary of one workload after the other, until there were enough.
/// `run` tells how many boundaries its workload had.
///
/// # Panics
/// When `run` does, with the seed and the boundary; and when a workload has no boundary.
pub fn every_cut(what: &str, first: u64, points: usize, mut run: impl FnMut(u64, u64) -> u64) {
    let (points, mut seed, mut done) = (cases(points), first_seed(first), 0);
    while done < points {
        eprintln!("{what}: seed {seed:#x}, {done} points so far");
        let boundaries = one_cut(what, seed, NO_CUT, &mut run);
        assert!(boundaries > 0, "{what}: the workload of seed {seed:#x} writes nothing");
        for cut in (0..boundaries).take(points - done) {
            one_cut(what, seed, cut, &mut run);
            done += 1;
        }
        seed = seed.wrapping_add(1);
    }
}

fn one_cut(what: &str, seed: u64, cut: u64, run: &mut impl FnMut(u64, u64) -> u64) -> u64 {
    catch_unwind(AssertUnwindSafe(|| run(seed, cut))).unwrap_or_else(|panic| {
        let at = if cut == NO_CUT { "no cut".to_owned() } else { format!("boundary {cut}") };
        eprintln!("{what}: failed at seed {seed:#x}, {at}; {SEED}={seed:#x} begins there");
        resume_unwind(panic)
    })
}

/// Calls `run` with one seed after the other.
///
/// # Panics
/// When `run` does, with the seed.
pub fn every_seed(what: &str, first: u64, usual: usize, mut run: impl FnMut(u64)) {
    for seed in seeds(first, usual) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(seed))) {
            eprintln!("{what}: failed at seed {seed:#x}; {SEED}={seed:#x} begins there");
            resume_unwind(panic);
        }
    }
}

#[test]
fn numbers_from_the_environment_are_taken_or_refused_by_name() {
    use std::{ffi::OsString, os::unix::ffi::OsStringExt};
    let read = |value: &str| number(SEED, Ok(value.to_owned()), 1..=0x1_0000);
    assert_eq!(number(SEED, Err(VarError::NotPresent), 1..=9), Ok(None));
    assert_eq!((read("12"), read("0xfF"), read("0x10000")), (Ok(Some(12)), Ok(Some(255)), Ok(Some(65536))));
    for wrong in ["", "0", "65537", "-1", "many", "1e3", "0x", "0xg", " 1", "18446744073709551616"] {
        let refused = format!(
            "MILLRACE_TEST_SEED is {wrong:?}: set it to a number from 1 to 65536 (0x… is hexadecimal), or not at all"
        );
        assert_eq!(read(wrong), Err(refused));
    }
    let strange = VarError::NotUnicode(OsString::from_vec(vec![b'1', 0xff]));
    assert!(number(RUNS, Err(strange), 1..=9).unwrap_err().starts_with("MILLRACE_TEST_RUNS is "));
}

#[test]
fn every_boundary_is_cut_until_there_were_enough() {
    let mut seen = Vec::new();
    let points = cases(5);
    every_cut("a workload", 7, 5, |seed, cut| {
        seen.push((seed, cut));
        3
    });
    let cut: Vec<_> = seen.iter().filter(|(_, cut)| *cut != NO_CUT).collect();
    assert_eq!(cut.len(), points);
    let first = first_seed(7);
    assert_eq!(seen[..6], [(first, NO_CUT), (first, 0), (first, 1), (first, 2), (first + 1, NO_CUT), (first + 1, 0)]);
}
