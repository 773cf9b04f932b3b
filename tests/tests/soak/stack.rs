//! What a volume is made of, as the operator knows it, and what can be done with that.

/// What is expected of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expect {
    Success,
    Refusal,
    /// It depends on what the operator does not know: it does what it says, or nothing.
    Either,
}

/// What holds the data, below the services that come and go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Plain,
    Stripe,
    Concat,
    Mirror,
    /// One parity chunk.
    Parity,
    /// Two of them.
    Parity2,
    Integrity,
    Xts,
    Authenticated,
    Share,
    /// A cipher over a mirror of legs with checksums.
    Nested,
}

impl Shape {
    /// How many legs it has in files or memory.
    pub(crate) fn legs(self) -> usize {
        match self {
            Self::Share => 0,
            Self::Plain | Self::Integrity | Self::Xts | Self::Authenticated => 1,
            Self::Stripe | Self::Concat | Self::Mirror | Self::Nested => 2,
            Self::Parity => 3,
            Self::Parity2 => 4,
        }
    }

    /// The service that may lose legs, and how many.
    pub(crate) fn redundancy(self) -> Option<(&'static str, usize)> {
        match self {
            Self::Mirror | Self::Nested => Some(("mirror", 1)),
            Self::Parity => Some(("parity", 1)),
            Self::Parity2 => Some(("parity", 2)),
            _ => None,
        }
    }

    pub(crate) fn is_enciphered(self) -> bool {
        matches!(self, Self::Xts | Self::Authenticated | Self::Nested)
    }

    /// A service in it that cannot be taken out.
    pub(crate) fn stays(self) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::Stripe => Some("stripe"),
            Self::Concat => Some("concat"),
            Self::Mirror => Some("mirror"),
            Self::Parity | Self::Parity2 => Some("parity"),
            Self::Integrity => Some("integrity"),
            Self::Xts | Self::Authenticated | Self::Nested => Some("crypt"),
            Self::Share => Some("share"),
        }
    }
}

/// A service that comes and goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Top {
    /// Operations per second.
    Throttle(usize),
    Meter(usize),
    /// The mode, and the fast leg's file.
    Cache(&'static str, String),
}

impl Top {
    pub(crate) fn service(&self) -> &'static str {
        match self {
            Self::Throttle(_) => "throttle",
            Self::Meter(_) => "meter",
            Self::Cache(..) => "cache",
        }
    }

    /// As an expression.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Throttle(iops) => format!("throttle(iops={iops})"),
            Self::Meter(tenant) => format!("meter(tenant=t{tenant})"),
            Self::Cache(mode, fast) => format!("cache(mode={mode}, {fast}(size=8M))"),
        }
    }

    /// As the daemon shows it: what is below a cache stands in its parentheses as well.
    fn shown(&self) -> String {
        match self {
            Self::Throttle(_) | Self::Meter(_) => self.text(),
            Self::Cache(mode, fast) => format!("cache(mode={mode}, {fast}("),
        }
    }
}

/// A volume's stack.
#[derive(Clone, Debug)]
pub(crate) struct Stack {
    /// From the top on.
    pub(crate) tops: Vec<Top>,
    pub(crate) shape: Shape,
    /// Leaves as expressions.
    pub(crate) legs: Vec<String>,
    /// The file with the key.
    pub(crate) key: String,
    /// Legs that are out of use.
    pub(crate) failed: Vec<usize>,
}

impl Stack {
    /// As an expression.
    pub(crate) fn text(&self) -> String {
        let (legs, key) = (self.legs.join(", "), &self.key);
        let checked = |leg: &String| format!("integrity(close-after=200ms, {leg})");
        let shape = match self.shape {
            Shape::Plain => legs,
            Shape::Stripe => format!("stripe(chunk=64K, {legs})"),
            Shape::Concat => format!("concat({}(size=2M), {})", self.legs[0], self.legs[1]),
            Shape::Mirror => format!("mirror(region=64K, {legs})"),
            Shape::Parity => format!("parity(region=64K, {legs})"),
            Shape::Parity2 => format!("parity(redundancy=2, region=64K, {legs})"),
            Shape::Integrity => checked(&self.legs[0]),
            Shape::Xts => format!("crypt(key=file:{key}, {legs})"),
            Shape::Authenticated => format!("crypt(mode=authenticated, save-after=200ms, key=file:{key}, {legs})"),
            Shape::Share => "share | volume:pool".to_owned(),
            Shape::Nested => {
                let legs: Vec<_> = self.legs.iter().map(checked).collect();
                format!("crypt(key=file:{key}) | mirror(region=64K, {})", legs.join(", "))
            }
        };
        let tops = self.tops.iter().map(Top::text);
        tops.chain([shape]).collect::<Vec<_>>().join(" | ")
    }

    /// Where a service that comes and goes is.
    pub(crate) fn place(&self, service: &str) -> Option<usize> {
        self.tops.iter().position(|top| top.service() == service)
    }

    pub(crate) fn has_cache(&self) -> bool {
        self.place("cache").is_some()
    }

    /// What is expected of a change at this place of the stack, counted from the top: below a cache it must wait until nothing is dirty.
    pub(crate) fn change_at(&self, place: usize) -> Expect {
        if self.place("cache").is_some_and(|cache| cache < place) { Expect::Either } else { Expect::Success }
    }

    /// What is expected where it is made larger.
    pub(crate) fn grows(&self) -> Expect {
        match self.shape {
            _ if self.has_cache() => Expect::Refusal,
            Shape::Parity | Shape::Parity2 => Expect::Refusal,
            Shape::Mirror if !self.failed.is_empty() => Expect::Refusal,
            Shape::Nested => Expect::Either,
            _ => Expect::Success,
        }
    }

    /// What is expected where it is made smaller.
    pub(crate) fn shrinks(&self) -> Expect {
        match self.shape {
            _ if self.has_cache() => Expect::Refusal,
            Shape::Parity | Shape::Parity2 | Shape::Mirror => Expect::Refusal,
            Shape::Nested => Expect::Either,
            _ => Expect::Success,
        }
    }

    /// What the stack that the daemon shows lacks, or has and should not have.
    pub(crate) fn mistake(&self, shown: &str) -> Option<String> {
        let key = self.shape.is_enciphered().then(|| format!("key=file:{}", self.key));
        let tops = self.tops.iter().map(Top::shown);
        let expected: Vec<String> = tops.chain(self.legs.iter().cloned()).chain(key).collect();
        if let Some(lacking) = expected.iter().find(|word| !shown.contains(word.as_str())) {
            return Some(format!("it lacks {lacking}"));
        }
        // What has gone would be one more.
        let surplus = ["throttle(", "meter(", "cache(", "move(", "file:"].into_iter().find(|word| {
            let should_be: usize = expected.iter().map(|part| part.matches(*word).count()).sum();
            shown.matches(*word).count() != should_be
        });
        surplus.map(|word| format!("it has {word} more or less often than it should"))
    }
}

#[test]
fn what_a_stack_lacks_or_has_too_much_of_is_noticed() {
    let [fast, leg] = ["file:/fast", "file:/leg"].map(str::to_owned);
    let tops = vec![Top::Throttle(5000), Top::Cache("back", fast)];
    let stack = Stack { tops, shape: Shape::Xts, legs: vec![leg], key: "/k1".to_owned(), failed: Vec::new() };
    let right = "throttle(iops=5000) | cache(mode=back, file:/fast(size=8M), crypt(key=file:/k1) | file:/leg)";
    assert_eq!(stack.mistake(right), None);
    for (old, new, why) in [
        ("iops=5000", "iops=50000", "it lacks throttle(iops=5000)"),
        ("mode=back", "mode=through", "it lacks cache(mode=back"),
        ("/k1", "/k2", "it lacks key=file:/k1"),
        ("/leg", "/other", "it lacks file:/leg"),
        ("throttle(", "meter(tenant=t1) | throttle(", "it has meter("),
        ("throttle(", "throttle(iops=9000) | throttle(", "it has throttle("),
        ("file:/leg)", "mirror(file:/leg, file:/old))", "it has file:"),
        ("file:/leg)", "move(file:/leg, memory))", "it has move("),
    ] {
        let wrong = right.replace(old, new);
        let told = stack.mistake(&wrong).expect(&wrong);
        assert!(told.starts_with(why), "{told}: {wrong}");
    }
}
