//! Fuzzes without end, from fresh seeds: `millrace-fuzz [SEED [COUNT]]`.

use std::{
    process::ExitCode,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use millrace_fuzz::{OPERATIONS, report, try_seed};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<u64>());
    let (first, count) = (arguments.next(), arguments.next());
    let fresh = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_nanos() as u64);
    let (Ok(first), Ok(count)) = (first.unwrap_or_else(|| Ok(fresh())), count.unwrap_or(Ok(u64::MAX))) else {
        eprintln!("usage: millrace-fuzz [SEED [COUNT]]");
        return ExitCode::from(2);
    };
    println!("sequences of {OPERATIONS} operations, from seed {first} on; stop with Ctrl-C");
    let (start, mut told, mut completions) = (Instant::now(), Instant::now(), 0);
    for number in 0..count {
        let seed = first.wrapping_add(number);
        match try_seed(seed) {
            Ok(more) => completions += more,
            Err(failure) => {
                eprintln!("{}", report(seed, &failure));
                return ExitCode::FAILURE;
            }
        }
        if told.elapsed() > Duration::from_secs(10) {
            told = Instant::now();
            println!("{:>6} s: {} sequences, {completions} commands, seed {seed}", start.elapsed().as_secs(), number + 1);
        }
    }
    println!("{count} sequences, {completions} commands in {:.1} s", start.elapsed().as_secs_f32());
    ExitCode::SUCCESS
}
