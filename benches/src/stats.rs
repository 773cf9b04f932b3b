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

    /// How far the median of as many other samples would usually be off this one: its standard error. It is told by the median distance, so
    /// that a few samples which are far out say nothing.
    pub(crate) fn error(&self) -> f64 {
        // Of values that lie normally: the deviation is 1.4826 median distances, and a median's error 1.2533 times that of a mean.
        1.2533 * 1.4826 * self.mad / (self.samples as f64).sqrt()
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

    #[test]
    fn more_samples_say_more_about_the_median() {
        let of = |times: usize| Summary::of(&[5.0, 1.0, 4.0, 100.0, 3.0].repeat(times)).unwrap().error();
        assert!((of(1) - 0.831).abs() < 0.001 && (of(4) - of(1) / 2.0).abs() < 1e-9, "{} and {}", of(1), of(4));
    }
}
