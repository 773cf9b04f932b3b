//! Medians and spreads.

use serde::{Deserialize, Serialize};

/// What several samples of one thing say.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Summary {
    /// How many there are.
    pub(crate) samples: usize,
    /// The middle one, or the mean of the two in the middle.
    pub(crate) median: f64,
    /// The smallest.
    pub(crate) min: f64,
    /// The largest.
    pub(crate) max: f64,
    /// The median of the distances from the median.
    pub(crate) mad: f64,
}

impl Summary {
    /// Of these values; `None` when there are none.
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        let median = median(values)?;
        let distances: Vec<f64> = values.iter().map(|value| (value - median).abs()).collect();
        let least = |a: f64, b: &f64| a.min(*b);
        let most = |a: f64, b: &f64| a.max(*b);
        Some(Self {
            samples: values.len(),
            median,
            min: values.iter().fold(f64::INFINITY, least),
            max: values.iter().fold(f64::NEG_INFINITY, most),
            mad: self::median(&distances)?,
        })
    }
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    Some(if sorted.len().is_multiple_of(2) { f64::midpoint(sorted[middle - 1], upper) } else { upper })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outliers_do_not_move_the_median() {
        let summary = Summary::of(&[5.0, 1.0, 4.0, 100.0, 3.0]).unwrap();
        assert_eq!(summary, Summary { samples: 5, median: 4.0, min: 1.0, max: 100.0, mad: 1.0 });
        assert_eq!(Summary::of(&[2.0, 4.0]).unwrap().median.to_bits(), 3.0f64.to_bits());
        assert_eq!(Summary::of(&[]), None);
    }
}
