//! Traces for other programs.

pub mod blktrace;
pub mod perfetto;
#[cfg(test)]
mod tests;
