// Every URL is relative, so that the page also works below a proxy's path prefix.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  displayRequestDuration: true,
  validatorUrl: null, // it would send the document to another host
});
