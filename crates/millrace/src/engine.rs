//! Which engine takes the controllers' I/O queues: `--engine NAME[:cores=N,ssds=N,latency=CYCLES]`.

use millrace_engine_model::{Engine, Shape, SoftEngine};
use millrace_frontends::nvme::{CardSpec, MakeEngine};

/// The engines by name.
const ENGINES: [(&str, MakeEngine); 2] = [("fvm-soft", soft), ("fvm-sim", sim)];

#[expect(clippy::unnecessary_wraps, reason = "made as the other engine is, which may be missing")]
fn soft(shape: Shape) -> Result<Box<dyn Engine>, String> {
    Ok(Box::new(SoftEngine::new(shape)))
}

#[cfg(feature = "sim")]
fn sim(shape: Shape) -> Result<Box<dyn Engine>, String> {
    millrace_engine_model::SimEngine::new(shape).map(|engine| Box::new(engine) as Box<dyn Engine>)
}

#[cfg(not(feature = "sim"))]
fn sim(_: Shape) -> Result<Box<dyn Engine>, String> {
    Err(WITHOUT.to_owned())
}

/// What a program without the simulated engine says.
#[cfg(not(feature = "sim"))]
const WITHOUT: &str = "this program was built without the simulated engine; build it with it: scripts/build --sim";

/// An engine in its written form.
pub(crate) fn parse(text: &str) -> Result<CardSpec, String> {
    let (name, settings) = text.split_once(':').unwrap_or((text, ""));
    let known = ENGINES.iter().find(|(known, _)| *known == name);
    let &(engine, make) = known.ok_or_else(|| format!("there is no engine {name}: fvm-soft and fvm-sim are"))?;
    #[cfg(not(feature = "sim"))]
    if engine == "fvm-sim" {
        return Err(WITHOUT.to_owned());
    }
    let mut spec = CardSpec { engine, make, cores: 1, ssds: 1, latency: 0 };
    for setting in settings.split(',').filter(|setting| !setting.is_empty()) {
        let wrong = || format!("{setting:?}: cores=1 to 16, ssds=1 to 16 and latency=CYCLES (up to a billion) can be set");
        let (name, value) = setting.split_once('=').ok_or_else(wrong)?;
        let value: u64 = value.parse().map_err(|_| wrong())?;
        match name {
            "cores" if (1..=16).contains(&value) => spec.cores = value as u8,
            "ssds" if (1..=16).contains(&value) => spec.ssds = value as u8,
            "latency" if value <= 1_000_000_000 => spec.latency = value,
            _ => return Err(wrong()),
        }
    }
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn engines_are_read_and_nonsense_is_not() {
        let spec = parse("fvm-soft:cores=2,ssds=4,latency=5000").unwrap();
        assert_eq!((spec.engine, spec.cores, spec.ssds, spec.latency), ("fvm-soft", 2, 4, 5000));
        let spec = parse("fvm-soft").unwrap();
        assert_eq!((spec.cores, spec.ssds, spec.latency), (1, 1, 0));
        for wrong in
            ["", "fvm", "fvm-soft:cores=0", "fvm-soft:ssds=17", "fvm-soft:cores", "fvm-soft:latency=x", "fvm-soft:a=1"]
        {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
