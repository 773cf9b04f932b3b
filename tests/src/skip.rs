//! What a system cannot give is not tested there; that is told, and not only to who looks for it.

use std::{fs::File, io::Write, thread};

/// Tells that the test that calls it leaves something out, and why. The output of a test that passes is not shown: a line of it goes to
/// the file that `MILLRACE_SKIPPED` names as well, if it names one, which `scripts/test` counts and shows.
///
/// # Panics
/// When that file cannot be written.
pub fn skip(why: &str) {
    println!("  skipped: {why}");
    let Some(path) = std::env::var_os("MILLRACE_SKIPPED") else { return };
    // A test's thread has its name. One write: other tests' lines go there, too.
    let line = format!("{}: {}\n", thread::current().name().unwrap_or("?"), why.replace('\n', " "));
    let written = File::options().create(true).append(true).open(path);
    written.and_then(|mut file| file.write_all(line.as_bytes())).expect("the list of what was skipped");
}
