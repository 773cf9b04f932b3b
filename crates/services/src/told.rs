//! What may happen without end, and is counted: when the log tells of it.

/// Whether the log tells of a thing's `count`th time: of the first ones, and of every power of two. So the first is never left out, and the log is
/// not flooded.
pub(crate) fn is_told(count: u64) -> bool {
    count <= 16 || count.is_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_ones_are_told_of_and_later_ones_ever_more_seldom() {
        assert!((1..=16).all(is_told));
        let later: Vec<_> = (17..=1000).filter(|count| is_told(*count)).collect();
        assert_eq!(later, [32, 64, 128, 256, 512]);
    }
}
